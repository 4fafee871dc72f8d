// Runs before anything is drawn, so that a chosen theme does not flash in from the other one. lib/theme.js changes it later.
try {
  const theme = localStorage.getItem("tokengrove-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is blocked: the theme of the system it is.
}
