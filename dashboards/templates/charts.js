"use strict";
// What is drawn: each builder answers with plotly's traces and layout for a panel, from the data in the page.

const D = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();                       // algorithms that the reader switched off, in all figures
const esc = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => document.documentElement.dataset.theme === "dark";
const colour = algorithm => D.looks[algorithm][isDark() ? 1 : 0];
const narrow = () => document.documentElement.clientWidth < 620;
const finite = values => values.filter(v => v !== null && Number.isFinite(v));
const number = v => v === null ? "–" : Number(v.toPrecision(4)).toString();

function faded(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

function base(extra) {
  const axis = {
    gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true, tickfont: {size: 11},
    title: {font: {size: 12}, standoff: 8}, showline: true, ticks: "", exponentformat: "power",
  };
  const layout = {
    margin: {l: 8, r: 10, t: 8, b: 8}, showlegend: false, paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: narrow() ? false : "zoom",
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink")},
    hoverlabel: {bgcolor: css("--raised"), bordercolor: css("--line"), font: {color: css("--ink"), size: 12}, align: "left"},
  };
  for (const [key, value] of Object.entries(extra)) {
    layout[key] = /^[xy]axis\d*$/.test(key) ? merge(axis, value) : value;
  }
  return layout;
}

function merge(one, other) {
  const both = {...one, ...other};
  if (one.title && other.title) both.title = {...one.title, ...other.title};
  return both;
}

// ---------------------------------------------------------------------------------------------- curves and incidents
const SYMBOLS = {lost: "triangle-down", recovered: "triangle-up", diverged: "x", failed: "square"};

function positiveRange(values, log) {
  const there = finite(values).filter(v => !log || v > 0);
  if (!there.length) return undefined;
  let [low, high] = [there.reduce((a, b) => Math.min(a, b)), there.reduce((a, b) => Math.max(a, b))];
  if (log) {
    [low, high] = [Math.log10(low), Math.log10(high)];
    const room = Math.max(.05 * (high - low), .03);
    return [low - room, high + room];
  }
  const room = (high - low || Math.abs(high) || 1) * .04;
  return [low - room, high + room];
}

function axisTicks(values, log) {
  const range = positiveRange(values, log);
  if (!log || !range) return {range, nticks: 7};
  const decades = range[1] - range[0];
  return {range, dtick: decades > 8 ? 2 : decades > 1.6 ? 1 : "D2", exponentformat: range[0] > -3 && range[1] < 6 ? "none" : "power"};
}

function drawnCurves(setting, y) {
  return D.curves.filter(c => (setting === null || c.s === setting) && c.y[y] && !hidden.has(c.a));
}

function curvePanel(setting, state, log) {
  const {x, y} = state, logX = state.scale === "log", mine = drawnCurves(setting, y);
  const all = drawnCurves(null, y).filter(c => D.panels[c.s].task === D.panels[setting].task);     // axes are shared
  const crowd = D.curves.filter(c => c.s === setting).length, traces = [];
  const shown = mine.map(c => {                  // a log axis begins where something has been paid
    const keep = c.x[x].map((v, i) => (!logX || v > 0) && (!log || c.y[y].v[i] > 0) ? i : -1).filter(i => i >= 0);
    const pick = list => list && keep.map(i => list[i]);
    return {...c, xs: pick(c.x[x]), v: pick(c.y[y].v), lo: pick(c.y[y].lo), hi: pick(c.y[y].hi)};
  });
  for (const c of shown) {
    if (!c.lo || crowd > 16) continue;
    const lo = log ? c.lo.map((v, i) => v > 0 ? v : c.v[i]) : c.lo;
    traces.push({
      type: "scatter", mode: "lines", x: [...c.xs, ...[...c.xs].reverse()], y: [...c.hi, ...lo.reverse()],
      fill: "toself", fillcolor: faded(colour(c.a), .13), line: {width: 0}, hoverinfo: "skip",
    });
  }
  for (const c of shown) {
    const who = `<b>${esc(c.l)}</b>${c.seeds > 1 ? ` · mean of ${c.seeds} seeds` : ""}${c.state ? ` · ${esc(c.state)}` : ""}`;
    traces.push({
      type: "scatter", mode: c.xs.length < 2 ? "markers" : "lines", x: c.xs, y: c.v, opacity: crowd > 16 ? .65 : 1,
      line: {color: colour(c.a), dash: D.looks[c.a][2], width: crowd > 16 ? 1.2 : 2}, marker: {color: colour(c.a), size: 8},
      hovertemplate: `${who}<br>%{x:.4~g} ${esc(D.short[x])}<br>%{y:.4~g}<extra></extra>`,
    });
    if (c.bad && c.xs.length) traces.push({
      type: "scatter", mode: "markers", x: c.xs.slice(-1), y: c.v.slice(-1), hoverinfo: "skip",
      marker: {symbol: "x", size: 9, color: colour(c.a), line: {width: 1, color: css("--page")}},
    });
    if (c.hit && D.panels[setting].target[0] === y && (!logX || c.hit[x] > 0)) traces.push({
      type: "scatter", mode: "markers", x: [c.hit[x]], y: [c.hit.y],
      marker: {symbol: "circle", size: crowd > 16 ? 5 : 9, color: css("--page"), line: {width: 2, color: colour(c.a)}},
      hovertemplate: `<b>${esc(c.l)}</b><br>reached ${esc(D.panels[setting].target.join(" = "))}<br>at %{x:.4~g} ${esc(D.short[x])}<extra></extra>`,
    });
  }
  const shapes = [];
  if (D.panels[setting].target[0] === y) shapes.push({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: D.panels[setting].target[1], y1: D.panels[setting].target[1],
    line: {color: css("--quiet"), width: 1, dash: "dot"},
  });
  if (log && x === "round" && D.panels[setting].gap) traces.push(rate(setting, shown, logX));
  const happened = D.incidents.filter(i => i.s === setting && !hidden.has(i.a)), strip = happened.length > 0;
  if (strip) traces.push({
    type: "scatter", mode: "markers", x: happened.map(i => i.x[x]), y: happened.map(() => 0), yaxis: "y2",
    marker: {symbol: happened.map(i => SYMBOLS[i.kind]), size: 9, color: happened.map(i => colour(i.a))},
    text: happened.map(i => `<b>${esc(i.kind)}</b> · ${esc(i.who)}<br>${esc(i.text).slice(0, 160)}`),
    hovertemplate: "%{text}<extra></extra>",
  });
  const layout = base({
    shapes,
    xaxis: {
      title: {text: D.names[x]}, type: logX ? "log" : "linear", anchor: strip ? "y2" : "y",
      ...axisTicks(all.flatMap(c => c.x[x]), logX),
    },
    yaxis: {
      title: {text: D.names[y]}, type: log ? "log" : "linear", domain: [strip ? .09 : 0, 1],
      ...axisTicks(all.flatMap(c => {
        const drawn = (_, i) => !logX || c.x[x][i] > 0, {v, lo, hi} = c.y[y];
        return (crowd > 16 ? [v] : [v, lo || [], hi || []]).flatMap(list => list.filter(drawn));
      }), log),
    },
  });
  if (strip) layout.yaxis2 = {domain: [0, .07], range: [-1, 1], showticklabels: false, showgrid: false, zeroline: false, fixedrange: true};
  return {data: traces, layout};
}

function rate(setting, shown, logX) {
  // A slope to compare with: what averaging alone would leave of the largest error, (1 - rho)^t from the left edge on.
  const errors = finite(shown.flatMap(c => c.v)), rounds = shown.flatMap(c => c.xs), gap = D.panels[setting].gap;
  if (!errors.length) return {type: "scatter", x: [], y: []};
  const [low, top] = [errors.reduce((a, b) => Math.min(a, b)), errors.reduce((a, b) => Math.max(a, b))];
  const [from, last] = [rounds.reduce((a, b) => Math.min(a, b)), rounds.reduce((a, b) => Math.max(a, b))];
  const end = Math.min(last, from + Math.log(low / top) / Math.log(Math.max(1 - gap, 1e-9)));
  const xs = Array.from({length: 60}, (_, i) => from + (end - from) * i / 59).filter(v => !logX || v > 0);
  return {
    type: "scatter", mode: "lines", x: xs, y: xs.map(t => top * (1 - gap) ** (t - from)), name: "rate",
    line: {color: css("--quiet"), width: 1.6, dash: "dashdot"},
    hovertemplate: `(1 − ρ)<sup>t</sup>, ρ = ${number(gap)}<extra></extra>`,
  };
}

// --------------------------------------------------------------------------------------------------- other builders
function sensitivityPanel(panel) {
  const xs = panel.points.map(p => p.value), log = Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) >= 8;
  const tint = colour(panel.a), line = {color: tint, dash: D.looks[panel.a][2], width: 2}, traces = [];
  const bars = (key, axis, name) => {
    const points = panel.points.filter(p => p[key]);
    traces.push({
      type: "scatter", mode: "lines+markers", x: points.map(p => p.value), y: points.map(p => p[key][0]), yaxis: axis,
      line, marker: {color: tint, size: 7},
      error_y: {
        type: "data", symmetric: false, color: tint, thickness: 1.2, width: 4,
        array: points.map(p => p[key][2] === null ? 0 : p[key][2] - p[key][0]),
        arrayminus: points.map(p => p[key][1] === null ? 0 : p[key][0] - p[key][1]),
      },
      customdata: points.map(p => `${p.runs} runs, ${p.reached} reached ${esc(panel.target)}${p.bad ? `, ${p.bad} diverged or failed` : ""}`),
      hovertemplate: `${esc(panel.key)} = %{x}<br>%{y:.4~g} ${esc(name)}<br>%{customdata}<extra></extra>`,
    });
  };
  traces.push({
    type: "scatter", mode: "markers", x: panel.points.flatMap(p => p.each.map(() => p.value)), y: panel.points.flatMap(p => p.each),
    marker: {color: faded(tint, .35), size: 6}, hoverinfo: "skip",
  });
  bars("final", "y", panel.metric === "upper_loss" ? "upper loss" : "accuracy");
  bars("mb", "y2", "MB");
  const missed = panel.points.filter(p => p.reached < p.runs);
  const annotations = missed.map(p => ({
    x: log ? Math.log10(p.value) : p.value, y: 0, yref: "y2 domain", yanchor: "bottom", showarrow: false,
    text: p.reached ? `${p.reached} of ${p.runs}` : "not<br>reached", font: {size: 10, color: css("--warn")},
  }));
  return {data: traces, layout: base({
    annotations,
    xaxis: {title: {text: panel.title.split(",")[0]}, type: log ? "log" : "linear", anchor: "y2", tickvals: xs, ticktext: xs.map(String)},
    yaxis: {title: {text: panel.metric === "upper_loss" ? "upper loss" : "accuracy"}, domain: [.54, 1]},
    yaxis2: {title: {text: "MB to target"}, domain: [0, .44], rangemode: "tozero"},
  })};
}

function barsPanel(source, rows, unit) {
  const part = D[source], tints = D.shades[part.names.length], keep = rows.filter(i => !hidden.has(part.a[i]));
  const total = keep.map(i => part.names.reduce((sum, name) => sum + (part.values[name][i] || 0), 0));
  const data = part.names.map((name, k) => ({
    type: "bar", orientation: "h", name, y: keep.map((_, n) => n), x: keep.map(i => part.values[name][i]), width: .42,
    marker: {color: tints[k], line: {color: css(isDark() ? "--quiet" : "--page"), width: .5}}, text: keep.map(() => esc(name)),
    textposition: "inside", insidetextanchor: "middle", textangle: 0, textfont: {size: 10.5}, constraintext: "inside",
    customdata: keep.map(i => esc(part.who[i])),
    hovertemplate: `<b>%{customdata}</b><br>${esc(name)}: %{x:.4~g} ${esc(unit)}<extra></extra>`,
  }));
  const annotations = keep.flatMap((i, n) => [
    {x: 0, y: n - .42, xanchor: "left", yanchor: "middle", showarrow: false, xshift: -2, text: `<b>${esc(part.who[i])}</b>  ${number(total[n])}`,
     font: {size: 11.5, color: css("--ink")}},
  ]);
  return {data, height: 46 * keep.length + 60, layout: base({
    barmode: "stack", annotations, bargap: .2, uniformtext: {mode: "hide", minsize: 9},
    xaxis: {title: {text: unit}, rangemode: "tozero", nticks: 7},
    yaxis: {range: [keep.length - .45, -.75], showticklabels: false, showgrid: false, showline: false, fixedrange: true},
  })};
}

function heatRange() {
  // The same for all runs; the first rounds, when nobody has learnt anything, must not take up the whole scale.
  const all = finite(D.heat.flatMap(run => run.z.flat())).sort((a, b) => a - b);
  return [all[Math.floor(all.length * .1)], Math.max(all[all.length - 1], all[Math.floor(all.length * .1)] + 1e-6)];
}

function heatPanel(run) {
  const [zmin, zmax] = heatRange();
  return {data: [{
    type: "heatmap", x: run.rounds, y: run.nodes.map(String), z: run.z, colorscale: "Cividis", zmin, zmax,
    colorbar: {thickness: 10, outlinewidth: 0, title: {text: narrow() ? "" : "accuracy", side: "right"}},
    hovertemplate: "node %{y}, round %{x}<br>accuracy %{z:.3f}<extra></extra>",
  }], layout: base({
    xaxis: {title: {text: "round"}, showgrid: false, nticks: 8},
    yaxis: {title: {text: run.nodes.length < run.of ? `node (${run.nodes.length} of ${run.of})` : "node"}, type: "category", autorange: "reversed", showgrid: false, nticks: 12},
  })};
}

function graphPanel(run, step) {
  const {xy: [xs, ys], edges, gap} = D.graphs.layouts[run.layout], apart = run.apart[step], sent = run.bytes[step];
  const carried = edges.map(([i, j]) => (sent[i] || 0) + (sent[j] || 0));
  const most = Math.max(...run.bytes[run.bytes.length - 1].map(v => 2 * (v || 0)), 1), bins = 6, data = [];
  for (let bin = 0; bin < bins; bin++) {
    const there = edges.filter((_, k) => Math.min(bins - 1, Math.floor(carried[k] / most * bins)) === bin);
    const share = (bin + 1) / bins;
    data.push({
      type: "scatter", mode: "lines", hoverinfo: "skip", line: {width: .8 + 4 * share, color: faded(isDark() ? "#8FA3B8" : "#5B6B7C", .25 + .6 * share)},
      x: there.flatMap(([i, j]) => [xs[i], xs[j], null]), y: there.flatMap(([i, j]) => [ys[i], ys[j], null]),
    });
  }
  data.push({                                    // what can be pointed at on a link
    type: "scatter", mode: "markers", marker: {size: 14, color: "rgba(0,0,0,0)"},
    x: edges.map(([i, j]) => (xs[i] + xs[j]) / 2), y: edges.map(([i, j]) => (ys[i] + ys[j]) / 2),
    text: edges.map(([i, j], k) => `link ${i} – ${j}<br>${number(carried[k] / 1e6)} MB so far`), hovertemplate: "%{text}<extra></extra>",
  });
  const positive = finite(run.apart.flat()).filter(v => v > 0);
  const low = Math.log10(positive.reduce((a, b) => Math.min(a, b), positive.length ? Infinity : 1e-3));
  const high = Math.max(Math.log10(positive.reduce((a, b) => Math.max(a, b), positive.length ? 0 : 1)), low + .5);
  const steps = high - low > 2 ? [1] : [1, 2, 5], ticks = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const step of steps) if (power + Math.log10(step) >= low && power + Math.log10(step) <= high) ticks.push([power, step]);
  }
  const few = xs.length <= 40;
  data.push({
    type: "scatter", mode: few ? "markers+text" : "markers", x: xs, y: ys, text: xs.map((_, i) => String(i)),
    textfont: {size: 11, color: apart.map(v => v > 0 && (Math.log10(v) - low) / (high - low) > .55 ? "#111" : "#fff")},
    marker: {
      size: few ? 30 : Math.max(7, 260 / Math.sqrt(xs.length) / 1.6), color: apart.map(v => v > 0 ? Math.log10(v) : low),
      colorscale: "Cividis", cmin: low, cmax: high, line: {width: 1.5, color: css(isDark() ? "--quiet" : "--page")},
      colorbar: {
        thickness: 10, outlinewidth: 0, tickvals: ticks.map(([p, s]) => p + Math.log10(s)),
        ticktext: ticks.map(([p, s]) => s === 1 ? `10<sup>${p}</sup>` : `${s}·10<sup>${p}</sup>`),
        title: {text: narrow() ? "" : "distance of x to the mean", side: "right"},
      },
    },
    customdata: xs.map((_, i) => `node ${i}<br>distance to the mean ${number(apart[i])}<br>${number((sent[i] || 0) / 1e6)} MB broadcast`),
    hovertemplate: "%{customdata}<extra></extra>",
  });
  const blank = {visible: false, range: [-1.25, 1.25], fixedrange: true};
  return {data, layout: base({
    xaxis: {...blank}, yaxis: {...blank, scaleanchor: "x"},
    annotations: gap ? [{text: `spectral gap ρ = ${number(gap)}`, xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "top", showarrow: false, font: {size: 12, color: css("--quiet")}}] : [],
  })};
}
