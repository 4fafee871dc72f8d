// What is known of messages without drawing them: which call a result answers, and a message as one text. Pure: no DOM.

/**
 * For each message its place: {message, index, call}. `call`: of a tool result, the call that it answers, as
 * {name, index} of the message with the call; null if no call has its id.
 */
export function linked(messages) {
  const calls = new Map();
  return messages.map((message, index) => {
    for (const call of message.tool_calls ?? []) calls.set(call.id, { name: call.function.name, index });
    return { message, index, call: message.role === "tool" ? calls.get(message.tool_call_id) ?? null : null };
  });
}

/** A message as one text, as the tree compares it: its text, then each call on a line of its own. */
export function messageText(message) {
  const calls = (message.tool_calls ?? []).map((call) => `${call.function.name}(${call.function.arguments})`);
  return [message.content, ...calls].filter((line) => line !== "").join("\n");
}

/**
 * The messages that differ of a fork: {recorded, sent}, each a list. `compared`: of the turn; `turn` and `nearest`: both
 * turns with their messages. Empty lists if no message differs.
 */
export function sides(compared, turn, nearest) {
  const found = compared.message;
  if (!found) return { recorded: [], sent: [] };
  const recorded = [...nearest.messages, nearest.output].slice(found.index);
  const sent = turn.messages.slice(found.index);
  if (found.why === "removed") return { recorded: recorded.slice(0, found.count), sent: [] };
  if (found.why === "inserted") return { recorded: [], sent: sent.slice(0, found.count) };
  return { recorded: recorded.slice(0, 1), sent: sent.slice(0, 1) };
}
