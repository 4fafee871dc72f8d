// Strands Agents. Over chat it loses all but the last of parallel calls: not run. It always streams.
import { Agent, tool } from "@strands-agents/sdk";
import { AnthropicModel } from "@strands-agents/sdk/models/anthropic";
import { OpenAIModel } from "@strands-agents/sdk/models/openai";
import { api, description, jsonSchema, loop, model, name, root, system, weather } from "./loop.mjs";

const given = { modelId: model, apiKey: "any" };
const agent = new Agent({
  model:
    api === "messages"
      ? new AnthropicModel({ ...given, clientConfig: { baseURL: root } })
      : new OpenAIModel({ ...given, api, clientConfig: { baseURL: `${root}/v1` } }),
  systemPrompt: system,
  tools: [tool({ name, description, inputSchema: jsonSchema, callback: weather })],
  printer: false,
});

await loop(async (prompt) => {
  const { content } = (await agent.invoke(prompt)).lastMessage;
  return content.flatMap((block) => (block.type === "textBlock" ? [block.text] : [])).join("");
});
