// The page: controls, panels that are drawn when they come into view, CSV on demand, theme and print.

const CONFIG = {responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset", scrollZoom: false};
const panels = [];                              // {figure, box, plot, build, height, isDrawn}
const csvSources = {};                          // figure id -> function that returns the rows of its CSV

function createElement(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    key.startsWith("on") ? element.addEventListener(key.slice(2), value) : element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(panel) {
  const {data, layout, height = panel.height} = panel.build();
  panel.plot.style.height = `${height}px`;
  layout.height = height;
  panel.isDrawn = true;
  return Plotly.react(panel.plot, data, layout, CONFIG);
}

// Panels near the screen are drawn one at a time, between frames, so that scrolling stays smooth.
const queue = new Set();
const whenIdle = window.requestIdleCallback || (task => setTimeout(task, 1));
function drawNext() {
  const [panel] = queue;
  if (!panel) return;
  queue.delete(panel);
  if (!panel.isDrawn) draw(panel);
  if (queue.size) whenIdle(drawNext, {timeout: 200});
}
const observer = new IntersectionObserver(entries => {
  const waiting = queue.size;
  for (const entry of entries) {
    const panel = panels.find(p => p.box === entry.target);
    if (!panel.isDrawn) entry.isIntersecting ? queue.add(panel) : queue.delete(panel);
  }
  if (!waiting && queue.size) whenIdle(drawNext, {timeout: 200});
}, {root: document, rootMargin: "900px 0px"});       // the document: margins count inside a frame too

function addPanel(figure, title, height, build) {
  const plot = createElement("div", {class: "plot", style: `height:${height}px`});
  const box = createElement("div", {class: "panel"}, ...(title ? [createElement("h4", {}, title)] : []), plot);
  figure.querySelector(".plots").append(box);
  const panel = {figure, box, plot, build, height, isDrawn: false};
  panels.push(panel);
  observer.observe(box);
  return panel;
}

const redraw = figure => panels.filter(p => p.isDrawn && (!figure || p.figure === figure)).forEach(draw);
const addControls = (figure, ...controls) => figure.querySelector(".controls").append(...controls);
const setColumns = (figure, count) => figure.querySelector(".plots").style.setProperty("--columns", count);

function addSwitch(figure, label, options, chosen, onchange) {
  if (options.length < 2) return;
  const buttons = options.map(([key, text]) => createElement("button", {
    type: "button", "aria-pressed": key === chosen, "data-key": key,
    onclick: event => {
      buttons.forEach(b => b.setAttribute("aria-pressed", b === event.currentTarget));
      onchange(key);
      redraw(figure);
    },
  }, text));
  const name = createElement("span", {class: "axis-name"}, label);
  addControls(figure, createElement("span", {class: "switch", role: "group", "aria-label": label}, name, ...buttons));
}

function addSelect(figure, label, options, onchange) {
  if (options.length < 2) return;
  const select = createElement("select", {"aria-label": label, onchange: event => { onchange(Number(event.target.value)); redraw(figure); }},
    ...options.map(([value, text]) => createElement("option", {value}, text)));
  addControls(figure, select);
}

function createSwatch(algorithm) {
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg"), line = document.createElementNS(ns, "line");
  svg.setAttribute("viewBox", "0 0 26 8");
  for (const [k, v] of Object.entries({x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 3})) line.setAttribute(k, v);
  line.dataset.algorithm = algorithm;
  line.setAttribute("stroke-dasharray", {solid: "none", dash: "6 3", dot: "2.5 2.5", dashdot: "6 2.5 2 2.5", longdash: "10 3"}[dashOf(algorithm)]);
  svg.append(line);
  return svg;
}

function colourSwatches() {
  document.querySelectorAll("line[data-algorithm]").forEach(line => line.setAttribute("stroke", colourOf(line.dataset.algorithm)));
}

function addLegend(figure, algorithms) {
  const buttons = algorithms.map(name => createElement("button", {
    type: "button", "aria-pressed": "true", "data-algorithm": name, title: "show or hide in all figures",
    onclick: () => {
      hidden.has(name) ? hidden.delete(name) : hidden.add(name);
      document.querySelectorAll(".legend button[data-algorithm]").forEach(b => b.setAttribute("aria-pressed", !hidden.has(b.dataset.algorithm)));
      redraw();
    },
  }, createSwatch(name), name));
  addControls(figure, createElement("span", {class: "legend"}, ...buttons));
}

function buildCurves(figure, {columns, log, x}) {
  const costs = DATA.curves.map(c => Math.max(...keepFinite(c.x.comm_mb), 0)).filter(v => v > 0);
  const differ = Math.max(...costs) / Math.min(...costs) > 6;
  const target = columns.find(y => DATA.panels.some(panel => panel.target[0] === y));
  const state = {x, y: target || columns[0], scale: !log && differ ? "log" : "linear"};
  addSwitch(figure, "horizontal axis", ["comm_mb", "node_mb", "seconds", "round"].map(k => [k, DATA.shortNames[k]]), state.x, k => { state.x = k; });
  addSwitch(figure, "vertical axis", columns.map(k => [k, DATA.shortNames[k]]), state.y, k => { state.y = k; });
  addSwitch(figure, "horizontal scale", [["linear", "linear"], ["log", "log"]], state.scale, k => { state.scale = k; });
  addLegend(figure, [...new Set(DATA.curves.map(c => c.series))]);
  const hasData = curve => columns.some(y => curve.y[y] && (!log || curve.y[y].mean.some(v => v > 0)));
  const settings = [...DATA.panels.keys()].filter(setting => DATA.curves.some(c => c.setting === setting && hasData(c)));
  const isSingle = settings.length === 1;
  setColumns(figure, isSingle ? 1 : Math.min(3, DATA.topologies > 1 ? DATA.topologies : settings.length));
  for (const setting of settings) {
    const title = DATA.panels.length > 1 ? DATA.panels[setting].label : "";
    addPanel(figure, title, isSingle ? 400 : 290, () => curvePanel(setting, state, log));
  }
  csvSources[figure.id] = () => [
    ["setting", "algorithm", "variant", "seeds", "state", "round", "comm_mb", "seconds", ...columns.flatMap(y => [y, `${y}_low`, `${y}_high`])],
    ...DATA.curves.flatMap(c => c.x.round.map((round, i) => [
      DATA.panels[c.setting].label, c.algorithm, c.label, c.seeds, c.status, round, c.x.comm_mb[i], c.x.seconds[i],
      ...columns.flatMap(y => ["mean", "low", "high"].map(key => c.y[y]?.[key]?.[i] ?? "")),
    ])),
  ];
}

function buildSensitivity(figure) {
  setColumns(figure, Math.min(3, DATA.sensitivity.length));
  for (const panel of DATA.sensitivity) {
    const {box} = addPanel(figure, `${panel.algorithm}: ${panel.title}${panel.family ? ` · ${panel.family}` : ""}`, 340, () => sensitivityPanel(panel));
    for (const [source, text] of [...panel.claims, ["Measured", panel.measured]]) {
      box.append(createElement("p", {class: "claim-text"}, createElement("b", {}, source), text));
    }
  }
  csvSources[figure.id] = () => [
    ["algorithm", "parameter", "others", "value", "runs", "diverged_or_failed", "reached", "metric", "final", "final_low", "final_high",
      "second_metric", "second", "second_low", "second_high", "mb_to_target", "mb_low", "mb_high"],
    ...DATA.sensitivity.flatMap(panel => panel.points.map(p => [
      panel.algorithm, panel.key, panel.family, p.value, p.runs, p.failed, p.reached,
      [panel.metric, panel.series[0]].filter(Boolean).join(", "), ...(p.final || ["", "", ""]),
      panel.series[1] || "", ...(p.second || ["", "", ""]), ...(p.mb || ["", "", ""]),
    ])),
  ];
}

function buildBars(figure, {source, unit}) {
  const bars = DATA[source], rows = [...bars.labels.keys()], pageSize = 16, state = {first: 0};
  const pages = Array.from({length: Math.ceil(rows.length / pageSize)},
    (_, n) => [n, `${n * pageSize + 1} – ${Math.min(rows.length, (n + 1) * pageSize)} of ${rows.length}`]);
  addSelect(figure, "which rows", pages, n => { state.first = n * pageSize; });
  const names = bars.names.map((name, k) => {
    const colour = DATA.scales[bars.names.length][k];
    return createElement("button", {type: "button", disabled: ""}, createElement("i", {style: `--light:${colour};--dark:${colour};border-radius:2px`}), name);
  });
  addControls(figure, createElement("span", {class: "legend"}, ...names));
  addPanel(figure, "", 46 * Math.min(pageSize, rows.length) + 60, () => barsPanel(source, rows.slice(state.first, state.first + pageSize), unit));
  csvSources[figure.id] = () => [
    ["run", "series", ...bars.names],
    ...rows.map(i => [bars.labels[i], bars.series[i], ...bars.names.map(name => bars.values[name][i])]),
  ];
}

function buildHeatmap(figure) {
  const state = {run: 0}, height = Math.max(240, 22 * Math.max(...DATA.heatmaps.map(run => run.nodes.length)) + 70);
  addSelect(figure, "which run", DATA.heatmaps.map((run, i) => [i, run.run]), i => { state.run = i; });
  addPanel(figure, "", Math.min(560, height), () => heatmapPanel(DATA.heatmaps[state.run]));
  csvSources[figure.id] = () => {
    const run = DATA.heatmaps[state.run];
    return [["run", "round", ...run.nodes.map(n => `node_${n}`)], ...run.rounds.map((round, i) => [run.run, round, ...run.accuracy.map(row => row[i])])];
  };
}

function buildTopology(figure) {
  const {runs, layouts} = DATA.graphs, state = {run: 0, step: 0};
  const output = createElement("output", {class: "fine"});
  const showRound = () => { output.textContent = `round ${runs[state.run].rounds[state.step]}`; };
  const slider = createElement("input", {type: "range", min: 0, "aria-label": "round", oninput: () => {
    state.step = Number(slider.value);
    showRound();
    redraw(figure);
  }});
  const chooseRun = i => {
    state.run = i;
    slider.max = runs[i].rounds.length - 1;
    slider.value = state.step = Number(slider.max);
    showRound();
  };
  addSelect(figure, "which run", runs.map((run, i) => [i, run.run]), chooseRun);
  addControls(figure, slider, output);
  chooseRun(0);
  addPanel(figure, "", 460, () => graphPanel(runs[state.run], state.step));
  const listNeighbours = (run, node) => layouts[run.layout].edges.filter(edge => edge.includes(node)).map(([a, b]) => a === node ? b : a).join(" ");
  csvSources[figure.id] = () => [
    ["run", "round", "node", "distance_x", "bytes_broadcast", "neighbours"],
    ...runs.flatMap(run => run.rounds.flatMap((round, t) => run.distance[t].map((distance, i) => [
      run.run, round, i, distance, run.bytes[t][i], t ? "" : listNeighbours(run, i),
    ]))),
  ];
}

function buildReplay(figure) {
  setColumns(figure, 2);
  for (const panel of DATA.replay) {
    const title = DATA.replay.length > 1 ? `${panel.setting}: ` : "";
    const {box} = addPanel(figure, `${title}seconds to ${panel.target}`, 340, () => replayPanel(panel));
    if (panel.map) addPanel(figure, `${title}first to reach ${panel.target}`, 340, () => winnersPanel(panel));
    else box.classList.add("wide");
    const cells = (row, tag) => createElement("tr", {}, ...row.map((text, i) => createElement(tag, i ? {class: "n"} : {}, text)));
    figure.querySelector(".plots").append(createElement("div", {class: "scroll wide"}, createElement("table", {},
      createElement("thead", {}, cells([`${title}seconds`, ...panel.networks], "th")),
      createElement("tbody", {}, ...panel.table.map(row => cells(row, "td"))))));
  }
  csvSources[figure.id] = () => [
    ["setting", "target", "algorithm", "network", "seconds", "low", "high"],
    ...DATA.replay.flatMap(panel => panel.groups.flatMap(group => group.times.map((times, i) => [
      panel.setting, panel.target, group.label, panel.networks[i], ...(times || ["", "", ""]),
    ]))),
  ];
}

const BUILDERS = {replay: buildReplay, curves: buildCurves, sensitivity: buildSensitivity, bars: buildBars, heatmap: buildHeatmap, topology: buildTopology};

function formatCsvCell(value) {
  let text = value === null || value === undefined ? "" : String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;     // no formulas in a spreadsheet
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

const formatCsv = figure => csvSources[figure.id]().map(row => row.map(formatCsvCell).join(",")).join("\n") + "\n";
// MLflow shows a page in a sandboxed frame, which refuses downloads without an error: offer to copy instead.
const IS_SANDBOXED = window !== window.top && window.origin === "null";

document.querySelectorAll("figure").forEach(figure => {
  BUILDERS[figure.dataset.kind](figure, JSON.parse(figure.dataset.options));
  const details = figure.querySelector("details.source"), textarea = details.querySelector("textarea");
  details.addEventListener("toggle", () => { if (details.open) textarea.value = formatCsv(figure); });
  const button = figure.querySelector("[data-download]");
  if (IS_SANDBOXED) button.textContent = `Copy ${figure.id}.csv`;
  button.addEventListener("click", () => {
    if (IS_SANDBOXED) {
      textarea.select();
      button.textContent = document.execCommand("copy") ? `Copied ${figure.id}.csv` : "Selected below: copy it";
      return;
    }
    const url = URL.createObjectURL(new Blob([formatCsv(figure)], {type: "text/csv"}));
    createElement("a", {href: url, download: `${figure.id}.csv`}).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  });
});
colourSwatches();

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  colourSwatches();
  redraw();
}
document.getElementById("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => setTheme(event.matches ? "dark" : "light"));
document.querySelectorAll("nav a").forEach(link => link.addEventListener("click", event => {
  event.preventDefault();                        // a sandboxed frame has no address to change
  document.getElementById(link.getAttribute("href").slice(1)).scrollIntoView({behavior: "smooth"});
}));
document.querySelectorAll("[data-more]").forEach(button => button.addEventListener("click", () => {
  document.querySelector("table.long").classList.add("all");
  button.remove();
}));

// On paper: everything drawn, light, as wide as the page.
let themeBeforePrint = null;
addEventListener("beforeprint", () => {
  themeBeforePrint = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  document.documentElement.classList.add("printing");
  colourSwatches();
  panels.forEach(panel => { draw(panel); Plotly.Plots.resize(panel.plot); });
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  setTheme(themeBeforePrint);
  panels.forEach(panel => Plotly.Plots.resize(panel.plot));
});
