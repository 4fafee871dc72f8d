"""Unmodified agent frameworks complete a tool loop through the server, and each session exports as one chain.

Each test has the few lines that point a framework at the server. All ask for the weather in Paris; the tool returns 21
degrees, and the last answer must contain them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.packages import package
from tests.conformance.served import MODEL, Served, assert_one_chain

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

QUESTION = "What is the weather in Paris?"
RESULT = "21 degrees and sunny in"


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Name of the city.
    """
    return f"{RESULT} {city}"


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_openai_agents(served: Served, api: str, stream: bool) -> None:
    agents, openai = package("agents"), package("openai")
    session = f"openai-agents-{api}-{stream}"
    client = openai.AsyncOpenAI(base_url=served.openai(session), api_key="any")
    model_class = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    model = model_class(model=MODEL, openai_client=client)
    agent = agents.Agent(
        name="weather", instructions="You help.", tools=[agents.function_tool(get_weather)], model=model
    )
    agents.set_tracing_disabled(True)
    if stream:
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(agent, QUESTION)
    assert f"{RESULT} Paris" in result.final_output
    assert_one_chain(served, session, turns=2)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_pydantic_ai(served: Served, api: str, stream: bool) -> None:
    pydantic_ai = package("pydantic_ai")
    session = f"pydantic-ai-{api}-{stream}"
    agent = pydantic_ai.Agent(pydantic_ai_model(served, session, api), tools=[get_weather], instructions="You help.")
    if stream:
        async with agent.run_stream(QUESTION) as run:
            output = await run.get_output()
    else:
        output = (await agent.run(QUESTION)).output
    assert f"{RESULT} Paris" in output
    assert_one_chain(served, session, turns=2)


def pydantic_ai_model(served: Served, session: str, api: str) -> Any:
    if api == "messages":
        provider = package("pydantic_ai.providers.anthropic").AnthropicProvider(
            base_url=served.anthropic(session), api_key="any"
        )
        return package("pydantic_ai.models.anthropic").AnthropicModel(MODEL, provider=provider)
    provider = package("pydantic_ai.providers.openai").OpenAIProvider(base_url=served.openai(session), api_key="any")
    models = package("pydantic_ai.models.openai")
    return (models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel)(MODEL, provider=provider)


async def test_pydantic_ai_takes_a_structured_answer(served: Served) -> None:
    pydantic_ai, pydantic = package("pydantic_ai"), package("pydantic")
    report = pydantic.create_model("Report", summary=(str, ...))
    model = pydantic_ai_model(served, "pydantic-ai-structured", "chat")
    agent = pydantic_ai.Agent(model, tools=[get_weather], output_type=report)
    assert f"{RESULT} Paris" in (await agent.run(QUESTION)).output.summary
    assert_one_chain(served, "pydantic-ai-structured", turns=2)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_litellm(served: Served, api: str) -> None:
    litellm = package("litellm")
    session = f"litellm-{api}"
    if api == "responses":
        litellm_responses(litellm, served.openai(session))
    else:
        base = served.openai(session) if api == "chat" else served.anthropic(session)
        litellm_completion(litellm, f"{'openai' if api == 'chat' else 'anthropic'}/{MODEL}", base)
    assert_one_chain(served, session, turns=2)


WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def litellm_completion(litellm: Any, model: str, base: str) -> None:
    function = {"name": "get_weather", "description": "weather", "parameters": WEATHER_SCHEMA}
    options = {
        "model": model,
        "api_base": base,
        "api_key": "any",
        "tools": [{"type": "function", "function": function}],
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = litellm.completion(messages=messages, **options).choices[0].message
    (call,) = message.tool_calls
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": get_weather("Paris")}]
    assert RESULT in litellm.completion(messages=messages, **options).choices[0].message.content


def litellm_responses(litellm: Any, base: str) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA}
    options = {"model": f"openai/{MODEL}", "api_base": base, "api_key": "any", "tools": [tool]}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    output = litellm.responses(input=items, **options).output
    call = output[-1]  # reasoning may precede it
    items += [item.model_dump(exclude_none=True) for item in output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    final = litellm.responses(input=items, **options)
    assert RESULT in final.output[-1].content[0].text


def test_smolagents_rewrites_its_calls_as_text_so_its_turns_are_not_one_chain(served: Served) -> None:
    """smolagents writes a call into the history as text ("Calling tools: ..."), which the model did not sample."""
    smolagents = package("smolagents")
    base = served.openai("smolagents")
    model = smolagents.OpenAIModel(model_id=MODEL, api_base=base, api_key="any")
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(get_weather)], model=model, verbosity_level=0)
    assert f"{RESULT} Paris" in agent.run(QUESTION)
    tree = served.tree("smolagents")
    assert [node["status"] for node in tree] == ["complete", "complete"]
    samples = served.samples("smolagents")
    assert len(samples) == 2
    assert sum(sum(sample["loss_mask"]) for sample in samples) == sum(node["output_tokens"] for node in tree)


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_strands(served: Served, api: str) -> None:
    strands = package("strands")
    session = f"strands-{api}"
    if api == "chat":
        arguments = {"base_url": served.openai(session), "api_key": "any"}
        model = package("strands.models.openai").OpenAIModel(client_args=arguments, model_id=MODEL)
    else:
        arguments = {"base_url": served.anthropic(session), "api_key": "any"}
        model = package("strands.models.anthropic").AnthropicModel(
            client_args=arguments, model_id=MODEL, max_tokens=500
        )
    agent = strands.Agent(model=model, tools=[strands.tool(get_weather)], callback_handler=None)
    assert f"{RESULT} Paris" in str(agent(QUESTION))
    assert_one_chain(served, session, turns=2)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_agno(served: Served, api: str) -> None:
    agno = package("agno.agent")
    session = f"agno-{api}"
    if api == "messages":
        parameters = {"base_url": served.anthropic(session)}
        model = package("agno.models.anthropic").Claude(id=MODEL, api_key="any", client_params=parameters)
    else:
        openai = package("agno.models.openai")
        model_class = openai.OpenAIChat if api == "chat" else openai.OpenAIResponses
        model = model_class(id=MODEL, base_url=served.openai(session), api_key="any")
    agent = agno.Agent(model=model, tools=[get_weather], telemetry=False)
    assert f"{RESULT} Paris" in agent.run(QUESTION).content
    assert_one_chain(served, session, turns=2)


def test_qwen_agent(served: Served) -> None:
    agents, tools = package("qwen_agent.agents"), package("qwen_agent.tools.base")

    class Weather(tools.BaseTool):  # type: ignore[misc, name-defined]
        name = "get_weather"
        description = "weather of a city"
        parameters = WEATHER_SCHEMA

        def call(self, params: Any, **_: Any) -> str:
            return get_weather(self._verify_json_format_args(params)["city"])

    raw = {"use_raw_api": True}
    model = {"model": MODEL, "model_server": served.openai("qwen-agent"), "api_key": "any", "generate_cfg": raw}
    agent = agents.Assistant(llm={**model, "model_type": "oai"}, function_list=[Weather()])
    *_, answers = agent.run([{"role": "user", "content": QUESTION}])
    assert f"{RESULT} Paris" in answers[-1]["content"]
    assert_one_chain(served, "qwen-agent", turns=2)


def test_camel(served: Served) -> None:
    camel = package("camel.agents")
    models, functions = package("camel.models"), package("camel.toolkits")
    types = package("camel.types")

    class Words(package("camel.utils").BaseTokenCounter):  # type: ignore[misc]
        """Replaces the framework's token counter, which would download a vocabulary."""

        def count_tokens_from_messages(self, messages: Any) -> int:
            return len(str(messages).split())

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, token_ids: list[int]) -> str:
            return bytes(token_ids).decode()

    model = models.ModelFactory.create(
        model_platform=types.ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model_type=MODEL,
        url=served.openai("camel"),
        api_key="any",
        model_config_dict={"max_tokens": 500},
        token_counter=Words(),
    )
    agent = camel.ChatAgent("You help.", model=model, tools=[functions.FunctionTool(get_weather)])
    assert f"{RESULT} Paris" in agent.step(QUESTION).msgs[0].content
    assert_one_chain(served, "camel", turns=2)


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_google_adk(served: Served, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adk, genai = package("google.adk"), package("google.genai.types")
    runners = package("google.adk.runners")
    session = f"google-adk-{api}"
    if api == "chat":
        package("litellm")
        model = package("google.adk.models.lite_llm").LiteLlm(
            model=f"openai/{MODEL}", api_base=served.openai(session), api_key="any"
        )
    else:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", served.anthropic(session))
        monkeypatch.setenv("ANTHROPIC_API_KEY", "any")
        model = package("google.adk.models.anthropic_llm").AnthropicLlm(model=MODEL)
    agent = adk.Agent(name="weather", model=model, instruction="You help.", tools=[get_weather])
    runner = runners.InMemoryRunner(agent=agent, app_name="app")
    await runner.session_service.create_session(app_name="app", user_id="u", session_id="s")
    question = genai.Content(role="user", parts=[genai.Part(text=QUESTION)])
    events = [event async for event in runner.run_async(user_id="u", session_id="s", new_message=question)]
    assert f"{RESULT} Paris" in events[-1].content.parts[-1].text
    assert_one_chain(served, session, turns=2)


def test_mini_swe_agent(served: Served, tmp_path: Any) -> None:
    """Its last turn is also a call: it runs the command that the result of the first call contains."""
    agents = package("minisweagent.agents.default")
    models, environments = package("minisweagent.models.litellm_model"), package("minisweagent.environments.local")
    base = {"api_base": served.openai("mini-swe-agent"), "api_key": "any", "tool_choice": "required"}
    model = models.LitellmModel(
        model_name=f"openai/{MODEL}", model_kwargs=base, observation_template="{{ output.output }}"
    )
    templates = {"system_template": "You help.", "instance_template": "{{ task }}"}
    agent = agents.DefaultAgent(model, environments.LocalEnvironment(cwd=str(tmp_path)), **templates)
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    assert agent.run(f"Use bash to run `echo {end}`")["exit_status"] == "Submitted"
    assert_one_chain(served, "mini-swe-agent", turns=2)
