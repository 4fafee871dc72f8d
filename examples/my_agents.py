"""One agent in three frameworks, for examples/my_loop.py: it gets an address, a key and a question, and answers."""

from openai import AsyncOpenAI


async def plain(base_url: str, api_key: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        reply = await openai.chat.completions.create(model="any", messages=messages, max_tokens=2)
    return reply.choices[0].message.content or ""


async def openai_agents(base_url: str, api_key: str, question: str) -> str:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

    set_tracing_disabled(True)  # without this, it sends traces to OpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        model = OpenAIChatCompletionsModel("any", openai)
        agent = Agent("letters", model=model, model_settings=ModelSettings(max_tokens=2))
        return (await Runner.run(agent, question)).final_output


async def langgraph(base_url: str, api_key: str, question: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="any", base_url=base_url, api_key=api_key, max_completion_tokens=2)
    state = await create_agent(model, tools=[]).ainvoke({"messages": [("user", question)]})
    return state["messages"][-1].text
