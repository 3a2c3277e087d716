// Draws the state of the runs. Every string is inserted as text, never as markup.

const AXIS_TITLES = {round: "rounds", comm_mb: "communication over all links (MB)", seconds: "training time (s)"};
const CIVIDIS = ["#00224E", "#35456C", "#666970", "#948E77", "#C8B866", "#FEE838"];    // as in the report
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const MAX_ROWS = 100, MANY_RUNS = 8;
const STATE_SIGNS = {
  waiting: "○", running: "▶", recovering: "↻", stalled: "…", stopped: "■", finished: "✓", diverged: "✗", failed: "✗",
};
const byId = (id) => document.getElementById(id);

export function createElement(tag, text, className) {
  const created = document.createElement(tag);
  if (text !== undefined) created.textContent = text;
  if (className) created.className = className;
  return created;
}

export function createRow(tag, texts) {
  const created = createElement("tr");
  created.append(...texts.map((text) => createElement(tag, text)));
  return created;
}

export function formatNumber(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return Number.isInteger(value) ? String(value) : value.toFixed(size >= 100 ? 1 : digits);
}

export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return s < 172800 ? `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min` : `${Math.round(s / 86400)} days`;
}

export const formatState = (state) => `${STATE_SIGNS[state] ?? ""} ${state}`;
export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const cssVariable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Plotly reads tags and entities in names.
const escapeHtml = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** Draw one curve per run, `metric` against `x`; the chosen run stands out. */
export function drawCurves(id, runs, chosen, metric, x, columns, log) {
  const traces = createTraces(runs, chosen, metric, x, columns, log);
  const ink = cssVariable("--ink"), grid = cssVariable("--grid");
  const axis = {gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true};
  const emptyText = runs.some((run) => run.rows.length) ? "this task does not have this metric" : "waiting for the first evaluation";
  const layout = {
    margin: {l: 48, r: 10, t: 8, b: 40}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: ink, size: 11}, hovermode: "closest", uirevision: `${metric} ${x}`,
    hoverlabel: {bgcolor: cssVariable("--panel"), bordercolor: cssVariable("--line"), font: {color: ink}},
    xaxis: {...axis, title: {text: AXIS_TITLES[x]}, rangemode: "tozero"},
    yaxis: {...axis, type: log ? "log" : "linear", exponentformat: "power", nticks: 7},
    showlegend: traces.length > 1 && traces.length <= MANY_RUNS,
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", font: {size: 10}, traceorder: "normal"},
    shapes: createLossMarks(chosen, x, columns),
    annotations: traces.length ? [] : [{
      text: emptyText, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: {color: cssVariable("--soft"), size: 13},
    }],
  };
  globalThis.Plotly.react(byId(id), traces, layout, {displayModeBar: false, responsive: true});
}

function createTraces(runs, chosen, metric, x, columns, log) {
  const [xIndex, yIndex, roundIndex] = [columns.indexOf(x), columns.indexOf(metric), columns.indexOf("round")];
  const counts = {}, crowded = runs.length > MANY_RUNS;        // many runs are a backdrop for the chosen one
  const order = chosen ? [...runs.filter((run) => run !== chosen), chosen] : runs;
  return order.map((run) => {
    const rows = run.rows.slice();
    if (rows.length && run.last.round > rows.at(-1)[roundIndex]) rows.push(columns.map((name) => run.last[name]));
    const number = counts[run.algorithm] = (counts[run.algorithm] ?? -1) + 1;       // among runs of its algorithm
    const isChosen = run === chosen;
    return {
      x: rows.map((row) => row[xIndex]), y: rows.map((row) => log && !(row[yIndex] > 0) ? null : row[yIndex]),
      customdata: rows.map((row) => row[roundIndex]), name: escapeHtml(run.label), type: "scatter",
      mode: rows.length < 25 ? "lines+markers" : "lines", marker: {size: 4}, opacity: isChosen ? 1 : crowded ? 0.4 : 0.75,
      line: {color: isDark() ? run.dark : run.light, width: isChosen ? 2.5 : 1.3,
        dash: crowded ? "solid" : number ? DASHES[number % DASHES.length] : run.dash},
      hovertemplate: `%{y:.4g}<br>round %{customdata}<extra>${escapeHtml(run.label)}</extra>`,
    };
  }).filter((trace) => trace.y.some((value) => value !== null));
}

/** Vertical lines where the chosen run lost workers. */
function createLossMarks(chosen, x, columns) {
  const [xIndex, roundIndex] = [columns.indexOf(x), columns.indexOf("round")];
  return (chosen?.lost ?? []).map((round) => {
    const row = chosen.rows.find((each) => each[roundIndex] >= round);
    const at = x === "round" ? round : row ? row[xIndex] : null;
    return {type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: {color: cssVariable("--bad"), width: 1.5, dash: "dot"}};
  }).filter((shape) => shape.x0 !== null);
}

function interpolateColour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1), low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return [1, 3, 5].map((i) => {
    const [a, b] = [CIVIDIS[low], CIVIDIS[low + 1]].map((colour) => parseInt(colour.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * (at - low));
  });
}

function createSvg(tag, attributes) {
  const created = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, value);
  return created;
}

/** Draw the network, its nodes coloured by the logarithm of their distance to the mean. */
export function drawTopology(network, distances) {
  const {positions} = network;
  byId("network").textContent = !network.nodes ? "not known yet"
    : `${network.nodes} nodes, ${network.links} links, spectral gap ${formatNumber(network.spectral_gap)}`
      + (positions ? "" : "; too many to be drawn");
  const svg = byId("topology"), positive = (distances ?? []).filter((value) => value > 0);
  const low = Math.log10(Math.min(...positive)), high = Math.log10(Math.max(...positive));
  drawColourScale(positive.length ? [10 ** low, 10 ** high] : null, distances);
  svg.replaceChildren();
  svg.toggleAttribute("hidden", !positions);
  if (!positions) return;
  for (const [a, b] of network.edges) {
    svg.append(createSvg("line", {x1: positions[a][0], y1: positions[a][1], x2: positions[b][0], y2: positions[b][1]}));
  }
  const radius = Math.min(0.09, 1.2 / Math.sqrt(positions.length) / 3);
  positions.forEach(([x, y], node) => {
    const value = distances ? distances[node] : null;
    const rgb = interpolateColour(!(value > 0) ? 0 : high > low ? (Math.log10(value) - low) / (high - low) : 1);
    const circle = createSvg("circle", {cx: x, cy: y, r: radius, fill: `rgb(${rgb.join(",")})`}), title = createSvg("title", {});
    title.textContent = `node ${node}: ${formatNumber(value)}`;
    circle.append(title);
    svg.append(circle);
    if (positions.length <= 40) {
      const label = createSvg("text", {x, y, fill: rgb[0] + rgb[1] + rgb[2] > 330 ? "#000" : "#fff"});
      label.textContent = node;
      svg.append(label);
    }
  });
}

function drawColourScale(range, distances) {
  const scale = byId("scale");
  scale.replaceChildren();
  if (range) {
    const strip = createElement("i");
    strip.style.background = `linear-gradient(90deg, ${CIVIDIS.join(", ")})`;
    scale.append(
      createElement("span", formatNumber(range[0])), strip, createElement("span", formatNumber(range[1])),
      createElement("span", "distance of x to the mean"),
    );
  } else if (distances) scale.append(createElement("span", "all nodes have the same x"));
}

/** Draw a row per node; of a large network, the nodes that are farthest from the mean. */
export function drawNodeTable(nodes) {
  const head = byId("nodes").tHead, body = byId("nodes").tBodies[0];
  const ids = nodes.nodes;              // of a large network: the sample whose accuracies and distances are recorded
  const sent = ids && nodes.bytes ? ids.map((id) => nodes.bytes[id] ?? null) : nodes.bytes;
  const megabytes = sent?.map((value) => value === null ? null : value / 1e6) ?? null;
  const columns = [
    ["accuracy", nodes.accuracy, 3], ["distance x", nodes.apart_x, 3], ["distance y", nodes.apart_y, 3], ["MB sent", megabytes, 2],
  ].filter(([, values]) => values);
  const count = columns.length ? columns[0][1].length : 0;
  byId("nodes-round").textContent = nodes.round === null ? "" : `at round ${nodes.round}`
    + (ids ? `, a sample of ${ids.length} nodes` : "")
    + (count > MAX_ROWS ? `: the ${MAX_ROWS} of ${count} that are farthest from the mean` : "");
  head.replaceChildren(createRow("th", ["node", ...columns.map(([name]) => name)]));
  let order = [...Array(count).keys()];
  if (count > MAX_ROWS) order = order.sort((a, b) => (nodes.apart_x?.[b] ?? 0) - (nodes.apart_x?.[a] ?? 0)).slice(0, MAX_ROWS);
  const highest = columns.map(([name, values]) => name === "accuracy" ? 1 : Math.max(...values, 1e-300));
  body.replaceChildren(...order.map((node) => {
    const tableRow = createRow("td", [String(ids ? ids[node] : node)]);
    columns.forEach(([, values, digits], i) => {
      const cell = createElement("td", formatNumber(values[node], digits), "cell"), bar = createElement("i");
      bar.style.width = `${100 * Math.min(1, Math.max(0, (values[node] ?? 0) / highest[i]))}%`;
      cell.append(bar);
      tableRow.append(cell);
    });
    return tableRow;
  }));
  if (!count) body.append(createRow("td", ["waiting for the first evaluation"]));
}

const EVENT_TEXTS = {
  started: (e) => e.after_round ? `resumed after round ${e.after_round}` : "started",
  continued: (e) => `extends ${e.source} after round ${e.after_round}`,
  lost: (e) => `workers lost after round ${e.after_round}: ${e.reason}, blocks ${(e.blocks ?? []).join(", ")}`,
  recovered: (e) => `recovered in ${formatNumber(e.seconds, 1)} s, resumed after round ${e.resumed_after}`,
  ended: (e) => `ended: ${e.status}${e.error ? `, ${e.error}` : ""}`,
};

/** List the events, the newest first. */
export function drawEvents(events) {
  byId("events").replaceChildren(...events.map((event) => {
    const item = createElement("li"), time = createElement("time");
    time.textContent = !event.timestamp ? "" : new Date(event.timestamp * 1000).toLocaleTimeString();
    const text = Object.hasOwn(EVENT_TEXTS, event.kind) ? EVENT_TEXTS[event.kind](event) : event.kind;
    item.append(time, createElement("span", text, event.kind === "lost" ? "failed" : ""));
    return item;
  }).reverse());
  if (!events.length) byId("events").append(createElement("li", "no events yet", "quiet"));
}
