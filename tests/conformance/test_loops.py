"""Unmodified agent frameworks run `loop` over each API that they speak; each session exports as one chain.

`--keep-sessions=tests/golden/clients` writes what they send, which `tests/api/test_captured_clients.py` replays.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance import loop
from tests.conformance.packages import package
from tests.conformance.served import MODEL, Served, assert_one_chain, assert_trained_once
from tests.conformance.test_frameworks import pydantic_ai_model
from tests.e2e.processes import ROOT, server_process

BUILTIN = "from proxy.engine.tiny.model import builtin_model_folder; print(builtin_model_folder())"

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])


def assert_one_loop(planned: Served, session: str, client: str, *answers: str) -> None:
    """Assert that the loop reached its three answers and is one chain; keep it if asked to."""
    planned.keep(session, client, version(client))  # first: where a check fails, the file shows why
    assert [answer.strip() for answer in answers] == list(loop.ANSWERS)
    assert_one_chain(planned, session, turns=loop.TURNS)


def name(client: str, api: str, stream: bool = False) -> str:
    """Return the name of a session, which is also its file's."""
    return f"{client}-{api}{'-stream' if stream else ''}"


def langchain_model(planned: Served, session: str, api: str, **more: Any) -> Any:
    if api == "messages":
        anthropic = package("langchain_anthropic").ChatAnthropic
        return anthropic(base_url=planned.anthropic(session), api_key="any", model=MODEL, **more)
    openai = package("langchain_openai").ChatOpenAI
    use_responses = api == "responses"
    return openai(base_url=planned.openai(session), api_key="any", model=MODEL, use_responses_api=use_responses, **more)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_langgraph(planned: Served, api: str, stream: bool) -> None:
    """A graph of a model node and LangGraph's own tool node, which a checkpointer carries to the second message."""
    graph, prebuilt = package("langgraph.graph"), package("langgraph.prebuilt")
    session = name("langgraph", api, stream)
    model = langchain_model(planned, session, api, streaming=stream).bind_tools([loop.get_weather])

    def call(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    builder = graph.StateGraph(graph.MessagesState)
    builder.add_node("model", call)
    builder.add_node("tools", prebuilt.ToolNode([loop.get_weather]))
    builder.add_edge(graph.START, "model")
    builder.add_conditional_edges("model", prebuilt.tools_condition)
    builder.add_edge("tools", "model")
    agent = builder.compile(checkpointer=package("langgraph.checkpoint.memory").InMemorySaver())
    assert_one_loop(planned, session, "langgraph", *langchain_answers(agent))


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_deepagents(planned: Served, api: str, stream: bool) -> None:
    session = name("deepagents", api, stream)
    agent = package("deepagents").create_deep_agent(
        model=langchain_model(planned, session, api, streaming=stream),
        tools=[loop.get_weather],
        system_prompt="You help.",
        checkpointer=package("langgraph.checkpoint.memory").InMemorySaver(),
    )
    assert_one_loop(planned, session, "deepagents", *langchain_answers(agent))


def langchain_answers(agent: Any) -> list[str]:
    """Return the answers to the user's two messages."""
    thread = {"configurable": {"thread_id": "one"}}
    states = [agent.invoke({"messages": [("user", text)]}, thread) for text in loop.MESSAGES]
    return [state["messages"][-1].text for state in states]


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_haystack(planned: Served, api: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    components, messages = package("haystack.components.generators.chat"), package("haystack.dataclasses")
    session = name("haystack-ai", api, stream)
    key = package("haystack.utils").Secret.from_token("any")
    if api == "messages":
        monkeypatch.setenv("ANTHROPIC_BASE_URL", planned.anthropic(session))
        integration = package("haystack_integrations.components.generators.anthropic")
        generator = integration.AnthropicChatGenerator(key, MODEL)
    else:
        kind = components.OpenAIChatGenerator if api == "chat" else components.OpenAIResponsesChatGenerator
        generator = kind(api_key=key, model=MODEL, api_base_url=planned.openai(session))
    agent = package("haystack.components.agents").Agent(
        chat_generator=generator,
        tools=[package("haystack.tools").create_tool_from_function(loop.get_weather)],
        streaming_callback=(lambda chunk: None) if stream else None,
    )
    history, answers = [], []
    for text in loop.MESSAGES:
        history = agent.run(messages=[*history, messages.ChatMessage.from_user(text)])["messages"]
        answers.append(history[-1].text)
    assert_one_loop(planned, session, "haystack-ai", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_autogen(planned: Served, api: str, stream: bool) -> None:
    session = name("autogen", api, stream)
    info = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    options: dict[str, Any] = {"model": MODEL, "api_key": "any", "model_info": {**info, "family": "unknown"}}
    if api == "chat":
        kind = package("autogen_ext.models.openai").OpenAIChatCompletionClient
        client = kind(base_url=planned.openai(session), **options)
    else:
        kind = package("autogen_ext.models.anthropic").AnthropicChatCompletionClient
        client = kind(base_url=planned.anthropic(session), **options)
    agent = package("autogen_agentchat.agents").AssistantAgent(
        "weather", client, tools=[loop.get_weather], model_client_stream=stream, max_tool_iterations=10
    )
    answers = []
    for text in loop.MESSAGES:
        if stream:
            *_, result = [event async for event in agent.run_stream(task=text)]
        else:
            result = await agent.run(task=text)
        answers.append(result.messages[-1].content)
    assert_one_loop(planned, session, "autogen-agentchat", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_semantic_kernel(planned: Served, api: str, stream: bool) -> None:
    """Streamed, its history joins the texts of all steps into the answer, which the model did not sample."""
    session = name("semantic-kernel", api, stream)
    if api == "chat":
        client = package("openai").AsyncOpenAI(base_url=planned.openai(session), api_key="any")
        kind = package("semantic_kernel.connectors.ai.open_ai").OpenAIChatCompletion
    else:
        client = package("anthropic").AsyncAnthropic(base_url=planned.anthropic(session), api_key="any")
        kind = package("semantic_kernel.connectors.ai.anthropic").AnthropicChatCompletion
    tool = package("semantic_kernel.functions").kernel_function(name="get_weather")(loop.get_weather)
    agents = package("semantic_kernel.agents")
    service = kind(ai_model_id=MODEL, async_client=client, api_key="any")
    kernel = package("semantic_kernel").Kernel(services=[service])
    kernel.add_function("tools", tool)
    agent = agents.ChatCompletionAgent(kernel=kernel, name="weather")
    thread, answers = agents.ChatHistoryAgentThread(), []
    for text in loop.MESSAGES:
        async for _ in (agent.invoke_stream if stream else agent.invoke)(messages=text, thread=thread):
            pass
        *_, last = [message async for message in thread.get_messages()]
        answers.append(last.content)
    if not stream:
        return assert_one_loop(planned, session, "semantic-kernel", *answers)
    planned.keep(session, "semantic-kernel", version("semantic-kernel"))
    assert [answer.endswith(end) for answer, end in zip(answers, loop.ANSWERS, strict=True)] == [True] * 3
    assert_trained_once(planned, session, 3, 8)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_agent_framework(planned: Served, api: str, stream: bool) -> None:
    session = name("agent-framework", api, stream)
    if api == "messages":
        kind, address = package("agent_framework.anthropic").AnthropicClient, planned.anthropic(session)
    else:
        clients = package("agent_framework.openai")
        kind = clients.OpenAIChatCompletionClient if api == "chat" else clients.OpenAIChatClient
        address = planned.openai(session)
    client = kind(model=MODEL, api_key="any", base_url=address)
    agent = package("agent_framework").Agent(client=client, instructions="You help.", tools=[loop.get_weather])
    thread, answers = agent.create_session(), []
    for text in loop.MESSAGES:
        if stream:
            result = await agent.run(text, session=thread, stream=True).get_final_response()
        else:
            result = await agent.run(text, session=thread)
        answers.append(result.messages[-1].text)
    assert_one_loop(planned, session, "agent-framework-core", *answers)


@pytest.mark.parametrize(
    ("api", "stream"),
    [("chat", False), ("chat", True), ("responses", False), ("messages", False), ("messages", True)],
)
def test_crewai(planned: Served, api: str, stream: bool) -> None:
    """It drops the text beside calls. Streamed over responses, it loses the calls themselves: not run."""
    crewai = package("crewai")
    session = name("crewai", api, stream)
    if api == "messages":
        model, options = MODEL, {"base_url": planned.anthropic(session), "provider": "anthropic"}
    else:
        kind = "completions" if api == "chat" else "responses"
        model, options = MODEL, {"base_url": planned.openai(session), "api": kind, "provider": "openai"}
    llm = crewai.LLM(model=model, api_key="any", stream=stream, **options)
    tool = package("crewai.tools").tool("get_weather")(loop.get_weather)
    agent = crewai.Agent(role="helper", goal="Help.", backstory="You help.", tools=[tool], llm=llm)
    history, answers = [], []
    for text in loop.MESSAGES:
        result = agent.kickoff([*history, {"role": "user", "content": text}])
        history = [message for message in result.messages if message["role"] != "system"]
        answers.append(result.raw)
    assert_one_loop(planned, session, "crewai", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_llama_index(planned: Served, api: str, stream: bool) -> None:
    session = name("llama-index", api, stream)
    if api == "messages":
        # It takes the size of the context from the model's name.
        options = {"model": "claude-sonnet-4-5", "base_url": planned.anthropic(session), "api_key": "any"}
        model = package("llama_index.llms.anthropic").Anthropic(**options)
    else:
        like = package("llama_index.llms.openai_like")
        kind = like.OpenAILike if api == "chat" else like.OpenAILikeResponses
        options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 100_000}
        model = kind(model=MODEL, api_base=planned.openai(session), api_key="any", **options)
    agent = package("llama_index.core.agent.workflow").FunctionAgent(
        tools=[loop.get_weather], llm=model, streaming=stream
    )
    memory = package("llama_index.core.memory").ChatMemoryBuffer.from_defaults(token_limit=50_000)
    answers = [(await agent.run(text, memory=memory)).response.content for text in loop.MESSAGES]
    assert_one_loop(planned, session, "llama-index-core", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_agentscope(planned: Served, api: str, stream: bool) -> None:
    models, credentials = package("agentscope.model"), package("agentscope.credential")
    tools, permission = package("agentscope.tool"), package("agentscope.permission")
    session = name("agentscope", api, stream)
    if api == "messages":
        kind = models.AnthropicChatModel
        credential = credentials.AnthropicCredential(api_key="any", base_url=planned.anthropic(session))
    else:
        kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponseModel
        credential = credentials.OpenAICredential(api_key="any", base_url=planned.openai(session))
    allowed = permission.PermissionContext(mode=permission.PermissionMode.BYPASS)
    agent = package("agentscope.agent").Agent(
        name="weather",
        system_prompt="You help.",
        model=kind(credential=credential, model=MODEL, stream=stream),
        toolkit=tools.Toolkit(tools=[tools.FunctionTool(loop.get_weather, is_read_only=True)]),
        state=package("agentscope.state").AgentState(permission_context=allowed),
    )
    user = package("agentscope.message").UserMsg
    answers = [(await agent.reply(user("user", text))).get_text_content() for text in loop.MESSAGES]
    assert_one_loop(planned, session, "agentscope", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_chatlas(planned: Served, api: str, stream: bool) -> None:
    chatlas = package("chatlas")
    session = name("chatlas", api, stream)
    options: dict[str, Any] = {"model": MODEL, "api_key": "any"}
    if api == "messages":
        chat = chatlas.ChatAnthropic(kwargs={"base_url": planned.anthropic(session)}, **options)
    elif api == "chat":
        chat = chatlas.ChatOpenAICompletions(base_url=planned.openai(session), preserve_thinking=True, **options)
    else:
        chat = chatlas.ChatOpenAI(base_url=planned.openai(session), **options)
    chat.register_tool(loop.get_weather)
    answers = []
    for text in loop.MESSAGES:
        if stream:
            for _ in chat.stream(text):
                pass
        else:
            chat.chat(text, echo="none", stream=False)
        answers.append(chat.get_last_turn().text)
    assert_one_loop(planned, session, "chatlas", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_ag2(planned: Served, api: str, stream: bool) -> None:
    ag2, config = package("ag2"), package("ag2.config")
    session = name("ag2", api, stream)
    if api == "messages":
        kind, address = config.AnthropicConfig, planned.anthropic(session)
    else:
        kind = config.OpenAIConfig if api == "chat" else config.OpenAIResponsesConfig
        address = planned.openai(session)
    model = kind(model=MODEL, api_key="any", base_url=address, streaming=stream)
    asked = ag2.Agent("weather", prompt="You help.", config=model, tools=[ag2.tool(loop.get_weather)])
    answers = []
    for text in loop.MESSAGES:
        asked = await asked.ask(text)
        answers.append(await asked.content())
    assert_one_loop(planned, session, "ag2", *answers)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_livekit(planned: Served, api: str) -> None:
    """A session without sound, which always streams. Over responses, it sends each answer also by its id."""
    agents = package("livekit.agents")
    session = name("livekit-agents", api)
    if api == "messages":
        model = package("livekit.plugins.anthropic").LLM(
            model=MODEL, base_url=planned.anthropic(session), api_key="any"
        )
    else:
        openai = package("livekit.plugins.openai")
        kind = openai.LLM if api == "chat" else functools.partial(openai.responses.LLM, use_websocket=False)
        model = kind(model=MODEL, base_url=planned.openai(session), api_key="any")

    async def get_weather(city: str, unit: str | None = None) -> str:
        """The weather in a city."""
        return loop.get_weather(city, unit)

    agent = agents.Agent(instructions="You help.", tools=[agents.function_tool(get_weather)])
    answers = []
    async with agents.AgentSession(llm=model, max_tool_steps=10) as spoken:
        await spoken.start(agent)
        for text in loop.MESSAGES:
            result = await spoken.run(user_input=text)
            answers.append([event.item.text_content for event in result.events if event.type == "message"][-1])
    assert_one_loop(planned, session, "livekit-agents", *answers)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_pipecat(planned: Served, api: str) -> None:
    """A pipeline without sound, which always streams. It sends the results of tools as JSON.

    Over messages, it loses all but the last of parallel calls.
    """
    contexts = package("pipecat.processors.aggregators.llm_context")
    aggregators = package("pipecat.processors.aggregators.llm_response_universal")
    frames, workers = package("pipecat.frames.frames"), package("pipecat.pipeline.worker")
    session = name("pipecat-ai", api)
    if api == "messages":
        kind = package("pipecat.services.anthropic.llm").AnthropicLLMService
        client = package("anthropic").AsyncAnthropic(base_url=planned.anthropic(session), api_key="any")
        options: dict[str, Any] = {"client": client}
    else:
        services = package("pipecat.services.openai." + ("llm" if api == "chat" else "responses.llm"))
        kind = services.OpenAILLMService if api == "chat" else services.OpenAIResponsesHttpLLMService
        options = {"base_url": planned.openai(session)}
    model = kind(api_key="any", settings=kind.Settings(model=MODEL, system_instruction="You help."), **options)

    async def get_weather(params: Any, city: str, unit: str = "celsius") -> None:
        """The weather in a city."""
        await params.result_callback(loop.get_weather(city, unit))

    pair = aggregators.LLMContextAggregatorPair(contexts.LLMContext(tools=[get_weather]))
    pipeline = package("pipecat.pipeline.pipeline").Pipeline([pair.user(), model, pair.assistant()])
    worker = workers.PipelineWorker(pipeline)
    runner = package("pipecat.workers.runner").WorkerRunner()
    started, ended = asyncio.Event(), asyncio.Queue[str]()

    @worker.event_handler("on_pipeline_started")  # type: ignore[untyped-decorator]
    async def start(worker: Any, frame: Any) -> None:
        started.set()

    @pair.assistant().event_handler("on_assistant_turn_stopped")  # type: ignore[untyped-decorator]
    async def end(aggregator: Any, message: Any) -> None:
        await ended.put(message.content)

    async def talk() -> list[str]:
        await started.wait()
        answers = []
        for text, last in zip(loop.MESSAGES, loop.ANSWERS, strict=True):
            message = {"role": "user", "content": text}
            await worker.queue_frame(frames.LLMMessagesAppendFrame(messages=[message], run_llm=True))
            while not (answer := (await ended.get()).replace('"', "").strip()).startswith(last.partition(":")[0]):
                pass  # the text beside calls
            answers.append(answer)
        await worker.queue_frame(frames.EndFrame())
        return answers

    await runner.add_workers(worker)
    _, answers = await asyncio.gather(runner.run(), talk())
    if api != "messages":
        return assert_one_loop(planned, session, "pipecat-ai", *answers)
    planned.keep(session, "pipecat-ai", version("pipecat-ai"))
    assert answers == [answer.replace(f" {loop.get_weather('Oslo')}", "") for answer in loop.ANSWERS]
    assert_trained_once(planned, session, 2, 8)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_dspy(planned: Served, api: str) -> None:
    """It ends an answer by a call of `submit`. Its prompts end with an instruction that the next one leaves out."""
    dspy = package("dspy")
    session = name("dspy", api)
    # It takes what a model can do from the model's name.
    if api == "messages":
        model = dspy.LM("anthropic/claude-sonnet-4-5", api_base=planned.anthropic(session), api_key="any", cache=False)
    else:
        kind = {"model_type": "responses"} if api == "responses" else {}
        model = dspy.LM("openai/gpt-4.1", api_base=planned.openai(session), api_key="any", cache=False, **kind)

    def submit(answer: str) -> dict[str, Any]:
        return {"think": "Now I know.", "calls": [{"name": "submit", "arguments": {"answer": answer}}]}

    agent = dspy.ReActV2("question -> answer", tools=[loop.get_weather])
    with dspy.context(lm=model, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        history, answers = None, []
        for calls, answer in zip(loop.CALLS, loop.ANSWERS, strict=True):
            result = agent(question=loop.message("Follow this.", [*calls, submit(answer)]), history=history)
            history = result.history
            answers.append(result.answer)
    planned.keep(session, "dspy", version("dspy"))
    assert answers == list(loop.ANSWERS)
    assert_trained_once(planned, session, *([2, 2, 3, 3, 4, 4] if api == "messages" else [*[1] * 6, 2, 2]))


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_instructor(planned: Served, api: str) -> None:
    """It forces a call, and sends a call that does not fit the schema back with the error."""
    instructor, pydantic = package("instructor"), package("pydantic")
    session = name("instructor", api)
    modes = {"chat": "TOOLS", "responses": "RESPONSES_TOOLS", "messages": "ANTHROPIC_TOOLS"}
    mode = getattr(instructor.Mode, modes[api])
    if api == "messages":
        sdk = package("anthropic").Anthropic(base_url=planned.anthropic(session), api_key="any")
        client = instructor.from_anthropic(sdk, mode=mode)
    else:
        sdk = package("openai").OpenAI(base_url=planned.openai(session), api_key="any")
        client = instructor.from_openai(sdk, mode=mode)
    report = pydantic.create_model("Report", city=(str, ...), degrees=(int, ...))

    def step(**arguments: Any) -> dict[str, Any]:
        return {"say": "Here it is.", "calls": [{"name": "Report", "arguments": arguments}]}

    steps = [step(city="Paris"), step(city="Paris", degrees="warm"), step(city="Paris", degrees=21)]
    if api == "responses":  # here it would leave the refused call out of the next request
        steps = steps[-1:]
    messages = [{"role": "user", "content": loop.message("Report.", steps)}]
    found = client.create(model=MODEL, messages=messages, response_model=report, max_retries=3, max_tokens=500)
    planned.keep(session, "instructor", version("instructor"))
    assert found.model_dump() == {"city": "Paris", "degrees": 21}
    assert_one_chain(planned, session, turns=len(steps))


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_browser_use(planned: Served, api: str) -> None:
    """Its model classes, without a browser: two texts, then an answer in the schema that it gives."""
    llm, pydantic = package("browser_use.llm"), package("pydantic")
    session = name("browser-use", api)
    if api == "chat":
        model = llm.ChatOpenAI(model=MODEL, base_url=planned.openai(session), api_key="any")
    else:
        model = llm.ChatAnthropic(model=MODEL, base_url=planned.anthropic(session), api_key="any")
    action = pydantic.create_model("AgentOutput", memory=(str, ...), index=(int, ...))
    expected = {"memory": "A button.", "index": 3}
    last = (
        {"say": json.dumps(expected)} if api == "chat" else {"calls": [{"name": "AgentOutput", "arguments": expected}]}
    )
    steps = [{"bare": True, "think": "First look.", "say": "A page."}, {"say": "A form."}, last]
    messages = [llm.SystemMessage(content="You help."), llm.UserMessage(content=loop.message("Look.", steps))]
    for expected_text in ("A page.", "A form."):
        text = (await model.ainvoke(messages)).completion
        assert text == expected_text
        messages += [llm.AssistantMessage(content=text), llm.UserMessage(content="Go on.")]
    found = (await model.ainvoke(messages, output_format=action)).completion
    planned.keep(session, "browser-use", version("browser-use"))
    assert found.model_dump() == expected
    # Over messages the schema is a tool, which the first two requests do not have.
    assert_trained_once(planned, session, *([3] if api == "chat" else [2, 1]))


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_inspect_ai(planned: Served, api: str, stream: bool) -> None:
    """Over responses it first asks the model to say hello, to learn which options it takes."""
    models, tools = package("inspect_ai.model"), package("inspect_ai.tool")
    session = name("inspect-ai", api, stream)
    if api == "messages":
        # Of more tokens, the SDK asks for a stream.
        limit = models.GenerateConfig(max_tokens=4000)
        options = {"model": f"anthropic/{MODEL}", "base_url": planned.anthropic(session), "config": limit}
    else:
        options = {"model": f"openai/{MODEL}", "base_url": planned.openai(session), "responses_api": api == "responses"}
    model = models.get_model(api_key="any", streaming=stream, **options)

    async def get_weather(city: str, unit: str | None = None) -> str:
        return loop.get_weather(city, unit)

    parameters = {"city": "Name of the city.", "unit": "celsius or fahrenheit."}
    tool = tools.ToolDef(get_weather, "get_weather", "The weather in a city.", parameters)
    history, answers = [models.ChatMessageSystem(content="You help.")], []
    for text in loop.MESSAGES:
        history.append(models.ChatMessageUser(content=text))
        more, output = await model.generate_loop(history, [tool])
        history += more
        answers.append(output.completion)
    if api != "responses":
        return assert_one_loop(planned, session, "inspect_ai", *answers)
    planned.keep(session, "inspect_ai", version("inspect_ai"))
    assert answers == list(loop.ANSWERS)
    assert_trained_once(planned, session, 1, loop.TURNS)
    assert planned.tree(session)[0]["purpose"] == "aux"


def test_lm_eval(planned: Served) -> None:
    """Each of its requests is a question of its own; it sends a seed."""
    models, instance = package("lm_eval.models.openai_completions"), package("lm_eval.api.instance")
    url = f"{planned.openai('lm-eval-chat')}/chat/completions"
    model = models.LocalChatCompletion(base_url=url, model=MODEL, tokenizer_backend=None, max_gen_toks=50)
    prompts = [loop.message("Ask.", [{"bare": True, "say": answer}]) for answer in ("one", "two")]
    asked = [json.dumps([{"role": "user", "content": prompt}]) for prompt in prompts]
    make = package("lm_eval.models.api_models").JsonChatStr
    requests = [
        instance.Instance("generate_until", {}, (make(text), {"until": ["\n\n"], "temperature": 0.5}), index)
        for index, text in enumerate(asked)
    ]
    assert model.generate_until(requests) == ["one", "two"]
    planned.keep("lm-eval-chat", "lm-eval", version("lm_eval"))
    assert_trained_once(planned, "lm-eval-chat", 1, 1)


def test_lm_eval_log_likelihoods(tmp_path: Path) -> None:
    """Two prompts in each request: lm-eval's sums are those of `POST /v1/logprobs`."""
    package("transformers")
    models, instance = package("lm_eval.models.openai_completions"), package("lm_eval.api.instance")
    python = os.environ.get("TOKENGROVE_TEST_SERVER_PYTHON", sys.executable)
    told = subprocess.run([python, "-c", BUILTIN], check=True, cwd=ROOT, capture_output=True, text=True)
    asked = [("Once upon a time", " there was"), ("The sky is", " blue"), ("A", " longer continuation of it")]
    with server_process(tmp_path, "--engine", "transformers") as process:
        url = process.url.rstrip("/")
        model = models.LocalCompletionsAPI(
            base_url=f"{url}/lm-eval/v1/completions",
            model=MODEL,
            tokenizer_backend="huggingface",
            tokenizer=told.stdout.strip(),
            batch_size=2,
            max_length=2048,
        )
        found = model.loglikelihood([instance.Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(asked)])
        for (context, continuation), (total, greedy) in zip(asked, found, strict=True):
            ids, start = model.tok_encode(context + continuation), len(model.tok_encode(context))
            body = {"input_ids": ids, "start": start, "top_k": 1}
            (row,) = httpx.post(f"{url}/v1/logprobs", json=body, timeout=60).raise_for_status().json()["data"]
            assert total == pytest.approx(sum(row["logprobs"]), abs=1e-3)
            assert greedy == all(
                value >= top[0][1] for value, top in zip(row["logprobs"], row["top_logprobs"], strict=True)
            )
        samples = httpx.post(f"{url}/trajectories/export", json={"session_id": "lm-eval"}, timeout=60).json()["samples"]
        assert [sum(sample["loss_mask"]) for sample in samples] == [1, 1, 1]


async def test_claude_agent_sdk(planned: Served, tmp_path: Path) -> None:
    """Its own Claude Code, with a tool of the test's process, over two messages of one conversation."""
    sdk = package("claude_agent_sdk")
    session = "claude-agent-sdk-messages-stream"

    @sdk.tool("get_weather", "The weather in a city.", loop.SCHEMA)
    async def get_weather(arguments: Any) -> Any:
        return {"content": [{"type": "text", "text": loop.get_weather(**arguments)}]}

    environment = {
        "ANTHROPIC_BASE_URL": planned.anthropic(session),
        "ANTHROPIC_AUTH_TOKEN": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "HOME": str(tmp_path),
        "CLAUDE_CONFIG_DIR": str(tmp_path / "config"),
    }
    tools = sdk.create_sdk_mcp_server("tools", tools=[get_weather])
    options = sdk.ClaudeAgentOptions(
        mcp_servers={"tools": tools},
        allowed_tools=["mcp__tools__get_weather"],
        tools=[],
        system_prompt="You help.",
        setting_sources=[],
        cwd=tmp_path,
        env=environment,
    )
    answers = []
    async with sdk.ClaudeSDKClient(options) as client:
        for text in loop.MESSAGES:
            await client.query(text.replace('"get_weather"', '"mcp__tools__get_weather"'))
            async for message in client.receive_response():
                if isinstance(message, sdk.ResultMessage):
                    answers.append(message.result)
    planned.keep(session, "claude-agent-sdk", version("claude-agent-sdk"), {str(tmp_path): "/home/agent"})
    assert answers == list(loop.ANSWERS)
    assert_one_chain(planned, session, turns=loop.TURNS)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents(planned: Served, api: str, stream: bool) -> None:
    agents, openai = package("agents"), package("openai")
    session = name("openai-agents", api, stream)
    client = openai.AsyncOpenAI(base_url=planned.openai(session), api_key="any")
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    model = kind(model=MODEL, openai_client=client)
    tool = agents.function_tool(loop.get_weather)
    agent = agents.Agent(name="weather", instructions="You help.", tools=[tool], model=model)
    agents.set_tracing_disabled(True)
    history, answers = [], []
    for text in loop.MESSAGES:
        history.append({"role": "user", "content": text})
        if stream:
            result = agents.Runner.run_streamed(agent, history)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, history)
        history = result.to_input_list()
        answers.append(result.final_output)
    assert_one_loop(planned, session, "openai-agents", *answers)


@STREAM
async def test_openai_agents_with_the_tools_of_openai(planned: Served, tmp_path: Path, stream: bool) -> None:
    """ShellTool, ApplyPatchTool and CustomTool, in turn: the client's own code runs what the model asks for."""
    agents, openai = package("agents"), package("openai")
    session = name("openai-agents-tools", "responses", stream)

    class Editor:
        def create_file(self, operation: Any) -> Any:
            (tmp_path / operation.path).write_text(agents.apply_diff("", operation.diff, mode="create"))
            return agents.editor.ApplyPatchResult(status="completed", output="created")

        update_file = delete_file = create_file

    def run_shell(request: Any) -> Any:
        action = request.data.action
        done = [subprocess.run(each, shell=True, cwd=tmp_path, capture_output=True) for each in action.commands]
        return agents.ShellResult(
            output=[
                agents.ShellCommandOutput(
                    stdout=each.stdout.decode(), outcome=agents.ShellCallOutcome(type="exit", exit_code=each.returncode)
                )
                for each in done
            ]
        )

    calls = [
        {"name": "apply_patch", "arguments": {"type": "create_file", "path": "a.txt", "diff": "+one\n+two\n"}},
        {"name": "shell", "arguments": {"commands": ["cat a.txt", "exit 3"]}},
    ]
    steps = [{"think": "hm", "calls": [call]} for call in calls]
    tools = [agents.ShellTool(executor=run_shell), agents.ApplyPatchTool(editor=Editor())]
    model = agents.OpenAIResponsesModel(
        model=MODEL, openai_client=openai.AsyncOpenAI(base_url=planned.openai(session), api_key="any")
    )
    agent = agents.Agent(name="worker", instructions="You help.", tools=tools, model=model)
    agents.set_tracing_disabled(True)
    task = f"{loop.MARK}{json.dumps([*steps, {'say': 'Done: {results}'}])}"
    if stream:
        result = agents.Runner.run_streamed(agent, task)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(agent, task)
    assert (tmp_path / "a.txt").read_text().split() == ["one", "two"]
    assert result.final_output == "Done: created\n[completed] one\ntwo\n[exit code 0]\n[exit code 3]"
    planned.keep(session, "openai-agents", version("openai-agents"), {str(tmp_path): "/home/agent"})
    assert_one_chain(planned, session, turns=3)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_pydantic_ai(planned: Served, api: str, stream: bool) -> None:
    pydantic_ai = package("pydantic_ai")
    session = name("pydantic-ai", api, stream)
    model = pydantic_ai_model(planned, session, api)
    agent = pydantic_ai.Agent(model, tools=[loop.get_weather], instructions="You help.")
    history, answers = [], []
    for text in loop.MESSAGES:
        if stream:
            async with agent.iter(text, message_history=history) as run:
                async for node in run:
                    if agent.is_model_request_node(node):
                        async with node.stream(run.ctx) as events:
                            async for _ in events:
                                pass
            result = run.result
        else:
            result = await agent.run(text, message_history=history)
        history = result.all_messages()
        answers.append(result.output)
    assert_one_loop(planned, session, "pydantic-ai-slim", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_strands(planned: Served, api: str, stream: bool) -> None:
    strands = package("strands")
    session = name("strands", api, stream)
    if api == "chat":
        arguments = {"base_url": planned.openai(session), "api_key": "any"}
        model = package("strands.models.openai").OpenAIModel(client_args=arguments, model_id=MODEL)
    else:
        arguments = {"base_url": planned.anthropic(session), "api_key": "any"}
        kind = package("strands.models.anthropic").AnthropicModel
        model = kind(client_args=arguments, model_id=MODEL, max_tokens=500)
    agent = strands.Agent(model=model, tools=[strands.tool(loop.get_weather)], callback_handler=None)
    answers = []
    for text in loop.MESSAGES:
        answers.append(str(await agent.invoke_async(text)))
    assert_one_loop(planned, session, "strands-agents", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_agno(planned: Served, api: str, stream: bool) -> None:
    agno = package("agno.agent")
    session = name("agno", api, stream)
    if api == "messages":
        options = {"base_url": planned.anthropic(session)}
        model = package("agno.models.anthropic").Claude(id=MODEL, api_key="any", client_params=options)
    else:
        openai = package("agno.models.openai")
        kind = openai.OpenAIChat if api == "chat" else openai.OpenAIResponses
        model = kind(id=MODEL, base_url=planned.openai(session), api_key="any")
    database = package("agno.db.in_memory").InMemoryDb()
    options = {"db": database, "add_history_to_context": True, "telemetry": False}
    agent = agno.Agent(model=model, tools=[loop.get_weather], session_id="one", **options)
    answers = []
    for text in loop.MESSAGES:
        if stream:
            *_, last = agent.run(text, stream=True, yield_run_output=True)
            answers.append(last.messages[-1].content)
        else:
            answers.append(agent.run(text).messages[-1].content)
    assert_one_loop(planned, session, "agno", *answers)


@STREAM
@pytest.mark.parametrize("how", ["sync", "async"])
async def test_google_genai(planned: Served, how: str, stream: bool) -> None:
    """A chat of Google's own SDK, which calls the functions itself."""
    genai, types = package("google.genai"), package("google.genai.types")
    session = name(f"google-genai-{how}", "google", stream)
    options = types.HttpOptions(base_url=planned.anthropic(session))
    config = types.GenerateContentConfig(
        tools=[loop.get_weather], thinking_config=types.ThinkingConfig(include_thoughts=how == "sync")
    )
    answers = []
    with genai.Client(api_key="any", http_options=options) as client:
        chats = client.chats if how == "sync" else client.aio.chats
        chat = chats.create(model=MODEL, config=config)
        for text in loop.MESSAGES:
            said = (chat.send_message_stream if stream else chat.send_message)(text)
            said = said if how == "sync" else await said
            if not stream:
                answers.append(said.text)
            elif how == "sync":
                answers.append(last_text([chunk for chunk in said]))
            else:
                answers.append(last_text([chunk async for chunk in said]))
    assert_one_loop(planned, session, "google-genai", *answers)


def last_text(chunks: list[Any]) -> str:
    """The text of the last reply of a stream that runs over calls."""
    texts: list[str] = []
    for chunk in chunks:
        parts = chunk.candidates[0].content.parts
        if any(part.function_call for part in parts):
            texts.clear()
        texts += [part.text or "" for part in parts if not part.thought and not part.function_call]
    return "".join(texts)


def test_langchain_google_genai(planned: Served) -> None:
    messages = package("langchain_core.messages")
    session = name("langchain-google-genai", "google")
    kind = package("langchain_google_genai").ChatGoogleGenerativeAI
    model = kind(model=MODEL, api_key="any", base_url=planned.anthropic(session)).bind_tools([loop.get_weather])
    history: list[Any] = []
    answers = []
    for text in loop.MESSAGES:
        history.append(messages.HumanMessage(text))
        while True:
            history.append(model.invoke(history))
            if not history[-1].tool_calls:
                break
            for call in history[-1].tool_calls:
                history.append(messages.ToolMessage(loop.get_weather(**call["args"]), tool_call_id=call["id"]))
        answers.append(history[-1].text)
    assert_one_loop(planned, session, "langchain-google-genai", *answers)


@STREAM
@pytest.mark.parametrize("api", ["chat", "messages", "google"])
async def test_google_adk(planned: Served, api: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    adk, genai = package("google.adk"), package("google.genai.types")
    runners, runs = package("google.adk.runners"), package("google.adk.agents.run_config")
    session = name("google-adk", api, stream)
    if api == "chat":
        package("litellm")
        kind = package("google.adk.models.lite_llm").LiteLlm
        model = kind(model=f"openai/{MODEL}", api_base=planned.openai(session), api_key="any")
    elif api == "google":
        monkeypatch.setenv("GOOGLE_API_KEY", "any")
        model = package("google.adk.models.google_llm").Gemini(model=MODEL, base_url=planned.anthropic(session))
    else:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", planned.anthropic(session))
        monkeypatch.setenv("ANTHROPIC_API_KEY", "any")
        model = package("google.adk.models.anthropic_llm").AnthropicLlm(model=MODEL)
    agent = adk.Agent(name="weather", model=model, instruction="You help.", tools=[loop.get_weather])
    runner = runners.InMemoryRunner(agent=agent, app_name="app")
    await runner.session_service.create_session(app_name="app", user_id="u", session_id="s")
    how = runs.RunConfig(streaming_mode=runs.StreamingMode.SSE if stream else runs.StreamingMode.NONE)
    answers = []
    for text in loop.MESSAGES:
        message = genai.Content(role="user", parts=[genai.Part(text=text)])
        run = runner.run_async(user_id="u", session_id="s", new_message=message, run_config=how)
        *_, last = [event async for event in run]
        # The last part of a stream may be empty: it has the signature of the reasoning.
        answers.append("".join(part.text or "" for part in last.content.parts if not part.thought))
    assert_one_loop(planned, session, "google-adk", *answers)


def test_qwen_agent(planned: Served) -> None:
    agents, tools = package("qwen_agent.agents"), package("qwen_agent.tools.base")

    class Weather(tools.BaseTool):  # type: ignore[misc, name-defined]
        name = "get_weather"
        description = "weather of a city"
        parameters = loop.SCHEMA

        def call(self, params: Any, **_: Any) -> str:
            return loop.get_weather(**self._verify_json_format_args(params))

    raw = {"use_raw_api": True}
    model = {"model": MODEL, "model_server": planned.openai("qwen-agent-chat"), "api_key": "any", "generate_cfg": raw}
    agent = agents.Assistant(llm={**model, "model_type": "oai"}, function_list=[Weather()])
    history, answers = [], []
    for text in loop.MESSAGES:
        history.append({"role": "user", "content": text})
        *_, said = agent.run(history)
        history += said
        answers.append(said[-1]["content"])
    assert_one_loop(planned, "qwen-agent-chat", "qwen-agent", *answers)


@STREAM
def test_anthropic_tool_runner(planned: Served, stream: bool) -> None:
    anthropic = package("anthropic")
    session = name("anthropic-runner", "messages", stream)
    client = anthropic.Anthropic(base_url=planned.anthropic(session), api_key="any")
    tool = anthropic.beta_tool(loop.get_weather)
    history, answers = [], []
    for text in loop.MESSAGES:
        history.append({"role": "user", "content": text})
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=500, messages=history, tools=[tool], stream=stream
        )
        for message in runner:
            last = message.get_final_message() if stream else message
            history.append({"role": "assistant", "content": [block.to_dict() for block in last.content]})
            if (results := runner.generate_tool_call_response()) is not None:
                history.append(results)
        answers.append(last.content[-1].text)
    assert_one_loop(planned, session, "anthropic", *answers)


@pytest.mark.parametrize(
    ("api", "stream"),
    [
        *(("chat", False), ("chat", True), ("responses", False), ("messages", False), ("messages", True)),
        *(("google", False), ("google", True)),
    ],
)
def test_litellm(planned: Served, api: str, stream: bool) -> None:
    """Over responses it goes through its bridge from chat, which joins parallel calls if streamed: not run.

    Streamed over messages, it writes a text of its own beside a call that has none. Over Google's API, it sends the
    results of tools as `{"content": RESULT}`.
    """
    litellm = package("litellm")
    session = name("litellm", api, stream)
    provider = {"chat": "openai", "responses": "openai/responses", "messages": "anthropic", "google": "gemini"}[api]
    base = planned.openai(session) if api in ("chat", "responses") else planned.anthropic(session)
    function = {"name": "get_weather", "description": "weather", "parameters": loop.SCHEMA}
    options = {"api_base": base, "api_key": "any", "tools": [{"type": "function", "function": function}]}
    messages, answers = [], []
    for text in loop.MESSAGES:
        messages.append({"role": "user", "content": text})
        while True:
            reply = litellm.completion(f"{provider}/{MODEL}", messages, stream=stream, **options)
            reply = litellm.stream_chunk_builder(list(reply), messages) if stream else reply
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = loop.get_weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(message.content.replace('{"content":"', "").replace('"}', ""))
    if not (api == "messages" and stream):
        return assert_one_loop(planned, session, "litellm", *answers)
    planned.keep(session, "litellm", version("litellm"))
    assert answers == list(loop.ANSWERS)
    assert_trained_once(planned, session, 4, 4, 5, 6)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_openhands(planned: Served, api: str, tmp_path: Path) -> None:
    sdk, tools = package("openhands.sdk"), package("openhands.sdk.tool")
    session = name("openhands-sdk", api)

    class GetWeatherAction(tools.Action):  # type: ignore[misc, name-defined]
        city: str
        unit: str | None = None

    class GetWeatherObservation(tools.Observation):  # type: ignore[misc, name-defined]
        pass

    class Executor(tools.ToolExecutor):  # type: ignore[misc, name-defined]
        def __call__(self, action: Any, conversation: Any = None) -> Any:
            return GetWeatherObservation.from_text(loop.get_weather(action.city, action.unit))

    class GetWeatherTool(tools.ToolDefinition):  # type: ignore[misc, name-defined]
        @classmethod
        def create(cls, *_: Any, **__: Any) -> Any:
            types = {"action_type": GetWeatherAction, "observation_type": GetWeatherObservation}
            return [cls(description="The weather in a city.", executor=Executor(), **types)]

    tools.register_tool("get_weather", GetWeatherTool)
    if api == "messages":
        options = {"model": f"anthropic/{MODEL}", "base_url": planned.anthropic(session)}
    else:
        mode = "responses" if api == "responses" else "chat"
        options = {"model": f"openai/{MODEL}", "base_url": planned.openai(session), "api_mode": mode}
    agent = sdk.Agent(llm=sdk.LLM(api_key="any", **options), tools=[tools.Tool(name="get_weather")])
    conversation = sdk.Conversation(agent=agent, workspace=str(tmp_path), visualizer=None)
    for text in loop.MESSAGES:
        conversation.send_message(text)
        conversation.run()
    found = [event.llm_message for event in conversation.state.events if isinstance(event, sdk.MessageEvent)]
    answers = ["".join(part.text for part in message.content) for message in found if message.role == "assistant"]
    planned.keep(session, "openhands-sdk", version("openhands-sdk"), {str(tmp_path): "/home/agent"})
    assert [answer.strip() for answer in answers] == list(loop.ANSWERS)
    assert_one_chain(planned, session, turns=loop.TURNS)


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_harbor(planned: Served, api: str) -> None:
    """The model classes of Terminus-2, without its terminal; over chat they collect the tokens of the turns."""
    chats, models = package("harbor.llms.chat"), package("harbor.llms.lite_llm")
    session = name("harbor", api)
    options = {"api_base": planned.openai(session), "api_key": "any", "use_responses_api": api == "responses"}
    model = models.LiteLLM(f"openai/{MODEL}", collect_rollout_details=True, **options)
    chat = chats.Chat(model, interleaved_thinking=True)
    steps = [
        {"bare": True, "think": "Look.", "say": "<keys>ls</keys>"},
        {"say": "<keys>cat a</keys>"},
        {"say": "Done."},
    ]
    prompts = [loop.message("Run it.", steps), "a b c\n", "text"]
    assert [(await chat.chat(prompt)).content for prompt in prompts] == [step["say"] for step in steps]
    planned.keep(session, "harbor", version("harbor"))
    assert_one_chain(planned, session, turns=3)
    if api == "chat":
        (details,) = chat.rollout_details
        nodes = planned.tree(session)
        assert [len(ids) for ids in details["prompt_token_ids"]] == [node["prompt_tokens"] for node in nodes]
        assert [len(ids) for ids in details["completion_token_ids"]] == [node["output_tokens"] for node in nodes]
        assert [len(values) for values in details["logprobs"]] == [node["output_tokens"] for node in nodes]
