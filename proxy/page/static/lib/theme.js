// The theme: "auto" (as the system has it), "light" or "dark", kept in this browser.
import { keep } from "./kept.js";

const NAME = "tokengrove-theme";
export const THEMES = ["auto", "light", "dark"];

/** The theme that the reader chose. */
export function theme() {
  return document.documentElement.dataset.theme ?? "auto";
}

/** Choose a theme, now and for later visits. Without storage it holds for this visit. */
export function chooseTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  keep(NAME, name === "auto" ? null : name);
  dispatchEvent(new Event("themechange"));
}

/** Call `changed` whenever other colours are to be drawn (a canvas has to do it itself). Returns a function that ends it. */
export function onThemeChange(changed) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("themechange", changed);
  system.addEventListener("change", changed);
  return () => {
    removeEventListener("themechange", changed);
    system.removeEventListener("change", changed);
  };
}

/** The value that a custom property has now, with its light or dark colour chosen: colour("--c1") is "rgb(29, 122, 76)". */
export function colour(property) {
  const probe = document.createElement("i");
  probe.style.color = `var(${property})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
