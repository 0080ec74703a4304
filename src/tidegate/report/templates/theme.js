"use strict";
// Before anything is drawn: the reader's choice of theme for this session, if one was made.
document.documentElement.classList.add("js");
try {
  const chosen = sessionStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // A browser may refuse storage to pages that come from a disk.
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    sessionStorage.setItem("theme", root.dataset.theme);
  } catch {
    // The choice then holds until the page is closed.
  }
}
