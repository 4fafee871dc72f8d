// The ways in which this panel shows texts of agents.
export { Line, Short, Text } from "../../../lib/text.js";
export { LongText } from "./long_text.js";
