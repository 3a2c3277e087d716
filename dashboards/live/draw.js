// Draws what is known of the runs. Every string goes in as text, never as markup.

const BY = {round: "round", comm_mb: "MB on all links", seconds: "seconds of training"};
const SHADES = ["#00224E", "#35456C", "#666970", "#948E77", "#C8B866", "#FEE838"];    // as in the report: Cividis
const MOST_ROWS = 100;
const SIGNS = {waiting: "○", running: "▶", recovering: "↻", quiet: "…", stopped: "■", finished: "✓", diverged: "✗", failed: "✗"};
const byId = (id) => document.getElementById(id);

export function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function figure(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return Number.isInteger(value) ? String(value) : value.toFixed(size >= 100 ? 1 : digits);
}

export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return s < 172800 ? `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min` : `${Math.round(s / 86400)} days`;
}

export const sign = (state) => `${SIGNS[state] ?? ""} ${state}`;
export const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Plotly reads tags and entities in names.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** One curve per run, of `metric` against `by`; the chosen run stands out. */
export function curves(id, runs, chosen, metric, by, columns, log) {
  const [x, y, r] = [columns.indexOf(by), columns.indexOf(metric), columns.indexOf("round")];
  const seen = {}, crowd = runs.length > 8;        // a crowd is a backdrop for the chosen run
  const order = chosen ? [...runs.filter((run) => run !== chosen), chosen] : runs;
  const dashes = ["solid", "dash", "dot", "dashdot", "longdash"];
  const traces = order.map((run) => {
    const rows = run.rows.slice();
    if (rows.length && run.last.round > rows.at(-1)[r]) rows.push(columns.map((name) => run.last[name]));
    const alike = seen[run.algorithm] = (seen[run.algorithm] ?? -1) + 1;
    const front = run === chosen;
    return {
      x: rows.map((row) => row[x]), y: rows.map((row) => log && !(row[y] > 0) ? null : row[y]),
      customdata: rows.map((row) => row[r]), name: plain(run.label), type: "scatter",
      mode: rows.length < 25 ? "lines+markers" : "lines", marker: {size: 4}, opacity: front ? 1 : crowd ? 0.4 : 0.75,
      line: {color: dark() ? run.dark : run.light, width: front ? 2.5 : 1.3,
        dash: crowd ? "solid" : alike ? dashes[alike % dashes.length] : run.dash},
      hovertemplate: `%{y:.4g}<br>round %{customdata}<extra>${plain(run.label)}</extra>`,
    };
  }).filter((trace) => trace.y.some((value) => value !== null));
  const lost = chosen && chosen.lost ? chosen.lost : [];
  const ink = style("--ink"), grid = style("--grid");
  const axis = {gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true};
  const layout = {
    margin: {l: 48, r: 10, t: 8, b: 40}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: ink, size: 11}, hovermode: "closest", uirevision: `${metric} ${by}`,
    hoverlabel: {bgcolor: style("--panel"), bordercolor: style("--line"), font: {color: ink}},
    xaxis: {...axis, title: {text: BY[by]}, rangemode: "tozero"},
    yaxis: {...axis, type: log ? "log" : "linear", exponentformat: "power", nticks: 7},
    showlegend: traces.length > 1 && traces.length <= 8,
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", font: {size: 10}, traceorder: "normal"},
    shapes: lost.map((round) => {
      const row = chosen.rows.find((each) => each[r] >= round);
      const at = by === "round" ? round : row ? row[x] : null;
      return {type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: {color: style("--bad"), width: 1.5, dash: "dot"}};
    }).filter((shape) => shape.x0 !== null),
    annotations: traces.length ? [] : [{text: runs.some((run) => run.rows.length) ? "this task has no such figure"
      : "waiting for the first evaluation", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
      font: {color: style("--soft"), size: 13}}],
  };
  globalThis.Plotly.react(byId(id), traces, layout, {displayModeBar: false, responsive: true});
}

function shade(part) {
  const at = Math.min(Math.max(part, 0), 1) * (SHADES.length - 1), low = Math.min(Math.floor(at), SHADES.length - 2);
  const channel = (i) => {
    const [a, b] = [SHADES[low], SHADES[low + 1]].map((colour) => parseInt(colour.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * (at - low));
  };
  return [channel(1), channel(3), channel(5)];
}

/** The network; nodes coloured by the logarithm of their distance to the mean. */
export function topology(network, apart) {
  const make = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const places = network.places;
  byId("network").textContent = !network.nodes ? "not known yet"
    : `${network.nodes} nodes, ${network.links} links, spectral gap ${figure(network.spectral_gap)}`
      + (places ? "" : "; too many to be drawn");
  const svg = byId("topology");
  svg.replaceChildren();
  svg.toggleAttribute("hidden", !places);
  const positive = (apart ?? []).filter((value) => value > 0);
  const low = Math.log10(Math.min(...positive)), high = Math.log10(Math.max(...positive));
  const scale = byId("scale");
  scale.replaceChildren();
  if (positive.length) {
    const strip = element("i");
    strip.style.background = `linear-gradient(90deg, ${SHADES.join(", ")})`;
    scale.append(element("span", figure(10 ** low)), strip, element("span", figure(10 ** high)), element("span", "distance of x to the mean"));
  } else if (apart) scale.append(element("span", "all nodes have the same x"));
  if (!places) return;
  for (const [a, b] of network.edges) {
    svg.append(make("line", {x1: places[a][0], y1: places[a][1], x2: places[b][0], y2: places[b][1]}));
  }
  const radius = Math.min(0.09, 1.2 / Math.sqrt(places.length) / 3);
  places.forEach(([x, y], node) => {
    const value = apart ? apart[node] : null;
    const rgb = value > 0 ? shade(high > low ? (Math.log10(value) - low) / (high - low) : 1) : shade(0);
    const circle = make("circle", {cx: x, cy: y, r: radius, fill: `rgb(${rgb.join(",")})`});
    const title = make("title", {});
    title.textContent = `node ${node}: ${figure(value)}`;
    circle.append(title);
    svg.append(circle);
    if (places.length <= 40) {
      const label = make("text", {x, y, fill: rgb[0] + rgb[1] + rgb[2] > 330 ? "#000" : "#fff"});
      label.textContent = node;
      svg.append(label);
    }
  });
}

/** A row per node; of a large network the nodes that are farthest from the mean. */
export function nodes(told) {
  const head = byId("nodes").tHead, body = byId("nodes").tBodies[0];
  const columns = [["accuracy", told.accuracy, figure], ["apart x", told.apart_x, figure], ["apart y", told.apart_y, figure],
    ["sent MB", told.bytes?.map((value) => value === null ? null : value / 1e6) ?? null, (value) => figure(value, 2)]].filter(([, values]) => values);
  const count = columns.length ? columns[0][1].length : 0;
  byId("nodes-round").textContent = told.round === null ? "" : `at round ${told.round}`
    + (count > MOST_ROWS ? `: the ${MOST_ROWS} of ${count} that are farthest from the mean` : "");
  head.replaceChildren(row("th", ["node", ...columns.map(([name]) => name)]));
  let order = [...Array(count).keys()];
  if (count > MOST_ROWS) order = order.sort((a, b) => (told.apart_x?.[b] ?? 0) - (told.apart_x?.[a] ?? 0)).slice(0, MOST_ROWS);
  const highest = columns.map(([name, values]) => name === "accuracy" ? 1 : Math.max(...values, 1e-300));
  body.replaceChildren(...order.map((node) => {
    const made = row("td", [String(node)]);
    columns.forEach(([, values, shown], i) => {
      const cell = element("td", shown(values[node]), "cell"), bar = element("i");
      bar.style.width = `${100 * Math.min(1, Math.max(0, (values[node] ?? 0) / highest[i]))}%`;
      cell.append(bar);
      made.append(cell);
    });
    return made;
  }));
  if (!count) body.append(row("td", ["waiting for the first evaluation"]));
}

export function row(tag, texts) {
  const made = element("tr");
  made.append(...texts.map((text) => element(tag, text)));
  return made;
}

export function events(told) {
  const say = {
    started: (e) => e.after_round ? `started again after round ${e.after_round}` : "started",
    continued: (e) => `goes on from ${e.source} after round ${e.after_round}`,
    lost: (e) => `processes lost after round ${e.after_round}: ${e.reason}, blocks ${(e.blocks ?? []).join(", ")}`,
    recovered: (e) => `recovered in ${figure(e.seconds, 1)} s, went on after round ${e.resumed_after}`,
    ended: (e) => `ended: ${e.status}${e.error ? `, ${e.error}` : ""}`,
  };
  byId("events").replaceChildren(...told.map((event) => {
    const item = element("li"), at = element("time");
    at.textContent = event.timestamp === null ? "" : new Date(event.timestamp * 1000).toLocaleTimeString();
    const known = Object.hasOwn(say, event.kind);
    item.append(at, element("span", known ? say[event.kind](event) : event.kind, event.kind === "lost" ? "failed" : ""));
    return item;
  }).reverse());
  if (!told.length) byId("events").append(element("li", "nothing yet", "quiet"));
}
