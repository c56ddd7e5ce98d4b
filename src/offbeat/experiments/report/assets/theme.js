"use strict";
// Errors are shown: a chart that is silently missing would mislead.
addEventListener("error", (event) => {
  const banner = document.createElement("p");
  banner.className = "error";
  banner.textContent = `Error on this page: ${event.message}`;
  document.body.prepend(banner);
});
const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  if (button) button.textContent = name === "dark" ? "Light" : "Dark";
}
setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
addEventListener("DOMContentLoaded", () => {
  setTheme(document.documentElement.dataset.theme);
  document.getElementById("theme").addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
});
