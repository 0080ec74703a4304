"use strict";
// Before anything is drawn: the reader's choice of theme for this session, if one was made.
document.documentElement.classList.add("js");
try {
  const chosen = sessionStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // A browser may refuse storage to pages that come from a disk.
}
