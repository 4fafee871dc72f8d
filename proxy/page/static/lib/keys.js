// Single keys that do something in a view. A reader can turn them off: they are in the way of speech input, and of screen
// readers that have such keys.
import { html, useEffect, useRef, useState } from "./html.js";
import { isCommand } from "./command_key.js";
import { keep, kept } from "./kept.js";

const KEPT = "tokengrove-keys";

/** Call the function of a key that is pressed, unless somebody types, holds a modifier or has turned keys off. */
export function useKeys(actions) {
  const now = useRef(actions);
  now.current = actions;
  useEffect(() => {
    const pressed = (event) => {
      if (!isCommand(event) || !keysOn()) return;
      const act = Object.hasOwn(now.current, event.key) && now.current[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
}

/** A button that turns the keys of this browser on and off. */
export function KeysSwitch() {
  const [on, setOn] = useState(keysOn);
  const turn = () => {
    setOn(!on);
    keep(KEPT, on ? "off" : "on");
  };
  return html`<button type="button" class="plain small" aria-pressed=${on} title="Keys of one letter do something on this page" onClick=${turn}>Keys ${on ? "on" : "off"}</button>`;
}

const keysOn = () => kept(KEPT) !== "off";
