"use strict";
// Tables, tabs, copying, saving, theme.
(() => {
  const status = document.getElementById("status_line");

  function announce(button, message) {
    const before = button.textContent;
    status.textContent = message;
    button.textContent = message;
    button.disabled = true;
    setTimeout(() => {
      button.textContent = before;
      button.disabled = false;
    }, 1200);
  }

  // Without access to the clipboard, copy from a selected text area.
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      area.className = "hidden";
      document.body.append(area);
      area.select();
      const copied = document.execCommand("copy");
      area.remove();
      return copied;
    }
  }

  function save(text, name, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async function results() {
    const element = document.getElementById("page_data");
    if (element.dataset.encoding === "plain") return element.textContent;
    const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  const cellText = (cell) => {
    const shown = cell.cloneNode(true);
    for (const extra of shown.querySelectorAll(".hidden")) extra.remove();
    return shown.textContent.replaceAll("\u2212", "-").trim();
  };
  const rowsOf = (table) => [...table.tBodies[0].rows].map((row) => [...row.cells]);
  const titlesOf = (table) => [...table.tHead.rows[0].cells].map((cell) => cell.dataset.title);

  function asMarkdown(table) {
    const escape = (text) => text.replace(/([\\`*[\]<>|$~])/g, "\\$1");
    const line = (texts) => `| ${texts.join(" | ")} |`;
    const rules = [...table.tHead.rows[0].cells].map((cell) => (cell.classList.contains("number") ? "---:" : ":---"));
    const rows = rowsOf(table).map((cells) =>
      line(cells.map((cell) => (cell.classList.contains("best") ? `**${escape(cellText(cell))}**` : escape(cellText(cell))))),
    );
    return [line(titlesOf(table).map(escape)), line(rules), ...rows].join("\n") + "\n";
  }

  function asCsv(table) {
    const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const rows = rowsOf(table).map((cells) => cells.map((cell) => cell.dataset.value ?? cellText(cell)));
    return [titlesOf(table), ...rows].map((row) => row.map(quote).join(",")).join("\n") + "\n";
  }

  const copies = {
    markdown: (figure) => asMarkdown(figure.querySelector("table")),
    csv: (figure) => asCsv(figure.querySelector("table")),
    snippet: (figure) => figure.querySelector("pre").textContent,
  };
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const copied = await copy(copies[button.dataset.copy](button.closest("figure")));
      announce(button, copied ? "Copied" : "Not copied");
    });
  }

  // Numbers by value, including those that start a text; text alphabetically; empty cells always last.
  function sortKey(cell) {
    const text = cellText(cell);
    const number = cell.dataset.value ?? text.replaceAll(",", "").match(/^[+\-]?\d*\.?\d+(e[+\-]?\d+)?/i)?.[0];
    return { text, number: number === undefined ? null : Number(number) };
  }
  function compare(first, second, direction) {
    if (!first.text || !second.text) return Number(!first.text) - Number(!second.text);
    if ((first.number === null) !== (second.number === null)) return first.number === null ? 1 : -1;
    const order = first.number === null ? first.text.localeCompare(second.text, "en") : first.number - second.number;
    return direction * order;
  }
  function sortBy(header) {
    const table = header.closest("table");
    const place = header.cellIndex;
    const firstDescending = header.dataset.better === "high";
    const before = header.ariaSort;
    const ascending = before === "none" ? !firstDescending : before === "descending";
    for (const other of header.parentElement.cells) other.ariaSort = "none";
    header.ariaSort = ascending ? "ascending" : "descending";
    const rows = [...table.tBodies[0].rows].map((row) => ({ row, key: sortKey(row.cells[place]) }));
    rows.sort((first, second) => compare(first.key, second.key, ascending ? 1 : -1));
    table.tBodies[0].append(...rows.map(({ row }) => row));
    status.textContent = `Sorted by ${header.dataset.title}, ${header.ariaSort}`;
  }
  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => sortBy(button.closest("th")));
  }

  function show(tab) {
    for (const other of tab.parentElement.children) {
      const chosen = other === tab;
      other.ariaSelected = String(chosen);
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).toggleAttribute("data-shown", chosen);
    }
    charts.drawAll();
  }
  for (const list of document.querySelectorAll(".tabs")) {
    const tabs = [...list.children];
    list.addEventListener("click", (event) => tabs.includes(event.target) && show(event.target));
    list.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1 };
      if (!(event.key in steps)) return;
      const next = tabs.at((tabs.indexOf(document.activeElement) + steps[event.key]) % tabs.length);
      next.focus();
      show(next);
    });
  }

  // The points of a chart as a table, built on request.
  function pointsTable(figure, xLabel, yLabel) {
    const bold = figure.data.filter((trace) => trace.showlegend);
    const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 7 });
    const table = document.createElement("table");
    const line = (parent, tag, values) => {
      const row = parent.insertRow();
      values.forEach((value, place) => {
        const cell = document.createElement(tag);
        cell.textContent = typeof value === "number" ? number.format(value) : (value ?? "");
        cell.className = place ? "number" : "";
        row.append(cell);
      });
    };
    line(table.createTHead(), "th", ["series", xLabel, yLabel]);
    const body = table.createTBody();
    for (const trace of bold) trace.x.forEach((x, place) => line(body, "td", [trace.meta, x, trace.y[place]]));
    return table;
  }
  for (const details of document.querySelectorAll("details.points")) {
    details.addEventListener("toggle", () => {
      const box = details.querySelector(".scroll");
      if (box.hasChildNodes()) return;
      const figure = charts.figureOf(details.closest("figure").querySelector(".chart"));
      box.append(pointsTable(figure, box.dataset.x, box.dataset.y));
    });
  }

  document.getElementById("toggle_theme").addEventListener("click", () => {
    toggleTheme();
    charts.drawAll();
  });
  document.getElementById("save_data").addEventListener("click", async () => save(await results(), "results.json", "application/json"));
  document.getElementById("print_page").addEventListener("click", () => window.print());

  // The table of contents marks the current section.
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const link = links.get(target.id);
        if (isIntersecting) link?.setAttribute("aria-current", "true");
        else link?.removeAttribute("aria-current");
      }
    },
    { rootMargin: "-15% 0px -75% 0px" },
  );
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);
})();
