"use strict";
// Before the page is drawn: the theme that the reader chose in this session, if any.
document.documentElement.classList.add("js");
try {
  const chosen = sessionStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // Browsers may deny storage to local files.
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    sessionStorage.setItem("theme", root.dataset.theme);
  } catch {
    // The choice then lasts until the page is closed.
  }
}
