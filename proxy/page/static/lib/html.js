// Components and their templates. Every text that a template gets becomes a text node, so text of agents is never markup.
import { h, render } from "preact";
import htm from "htm";

export { render };
export { useEffect, useLayoutEffect, useMemo, useRef, useState, useCallback } from "preact/hooks";
export const html = htm.bind(h);
