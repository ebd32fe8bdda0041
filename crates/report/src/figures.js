"use strict";
// Interactive figures: tooltips, legend entries that isolate their series, zoom by dragging, a log axis, individual runs
// next to their mean. Drawn on canvas from the data of the report; the static SVG is kept for print.
const Figures = (() => {
  // As in colour.rs: numbers from RAMP_START on are steps of a sequential ramp.
  const SERIES = 9, RAMP = 7, RAMP_START = 900;
  const indexOf = (color) => (color >= RAMP_START ? SERIES + ((color - RAMP_START) % RAMP) : color % SERIES);
  // Maximum number of points of a line with markers.
  const FEW = 16;
  const UNITS = {
    number: [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]],
    bytes: [[1e15, " PB"], [1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " KB"], [1, " B"]],
    seconds: [[1, " s"], [1e-3, " ms"], [1e-6, " µs"], [1e-9, " ns"]],
    percent: [[0.01, " %"]],
  };
  const HEIGHT = 260, PAD = { left: 58, right: 14, top: 10, bottom: 26 };

  /** A value with its unit, at most this many significant digits. */
  function format(unit, value, digits = 6) {
    if (!Number.isFinite(value)) return "none";
    const units = UNITS[unit] ?? UNITS.number, size = Math.abs(value);
    const [one, name] = units.find(([one]) => size >= one * 0.9995) ?? units[units.length - 1];
    const scaled = size / one, sign = value < 0 ? "−" : "";
    if (scaled === 0) return `0${name}`;
    if (scaled < 0.001 || scaled >= 9999.5) return `${sign}${Number(scaled.toPrecision(Math.max(digits - 2, 1))).toExponential()}${name}`.replace("e+", "e");
    return `${sign}${Number(scaled.toPrecision(digits))}${name}`;
  }

  function ticks(low, high, log, most) {
    if (log) {
      const [from, to] = [Math.log10(low), Math.log10(high)], list = [];
      for (let every = 1; ; every++) {
        const first = Math.ceil(from / every - 1e-9), last = Math.floor(to / every + 1e-9);
        if (last - first + 1 > Math.max(most, 2)) continue;
        for (let n = first; n <= last; n++) list.push(10 ** (n * every));
        break;
      }
      if (list.length >= 3) return list;
      const finer = [];
      for (let n = Math.floor(from); n <= Math.ceil(to); n++) for (const m of [1, 2, 5]) finer.push(m * 10 ** n);
      const inside = finer.filter((x) => x >= low * 0.999999 && x <= high * 1.000001);
      if (inside.length >= 2 && inside.length <= most + 1) return inside;
      if (inside.length > most + 1) return list;
    }
    const raw = (high - low) / Math.max(most, 2);
    if (!(raw > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999999);
    const list = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9 && list.length < 64; n++) list.push(n * step);
    return list;
  }

  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let palette = null;
  const colours = () => palette ??= { series: Array.from({ length: SERIES + RAMP }, (_, i) => css(`--s${i}`)), text: css("--text"), quiet: css("--quiet"), edge: css("--edge"), card: css("--card") };
  const colourOf = (color) => colours().series[indexOf(color)];
  const nearest = (list, x) => {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] <= x) low = middle; else high = middle;
    }
    return high >= 0 && Math.abs(list[high] - x) < Math.abs(list[low] - x) ? high : low;
  };

  /** Mean and range of some runs at every x for which all of them have a value. */
  function together(runs) {
    const by = new Map();
    for (const { x, y } of runs) x.forEach((x, i) => { if (Number.isFinite(y[i])) (by.get(x) ?? by.set(x, []).get(x)).push(y[i]); });
    const at = [...by.keys()].sort((a, b) => a - b);
    const all = at.map((x) => by.get(x));
    return {
      x: at, y: all.map((list) => list.reduce((a, b) => a + b, 0) / list.length),
      low: all.map((list) => Math.min(...list)), high: all.map((list) => Math.max(...list)), many: runs.length > 1,
    };
  }

  class Plot {
    /** `shown(series, run)` returns whether to draw it; both are names. */
    constructor(host, spec, { shown = () => true, label = "" } = {}) {
      Object.assign(this, { host, spec, shown, label, zoom: null, log: spec.y.log, single: false, only: null, cursor: null });
      this.base = element("canvas", { "aria-hidden": "true" });
      this.over = element("canvas", { tabindex: "0", role: "img", "aria-roledescription": "chart" });
      this.tip = element("div", { class: "tip", hidden: "" });
      this.say = element("p", { class: "said", "aria-live": "polite" });
      this.tools = element("div", { class: "tools" });
      const button = (text, toggle, pressed) => {
        const made = element("button", { type: "button", "aria-pressed": pressed === undefined ? null : String(pressed) }, text);
        made.addEventListener("click", () => { toggle(made); this.draw(); });
        this.tools.append(made);
        return made;
      };
      // Logarithms on a linear axis are not taken again.
      if (this.positive() && !/^log/.test(spec.y.label)) button("Log", (b) => { this.log = !this.log; b.setAttribute("aria-pressed", String(this.log)); }, this.log);
      if (spec.series.some((s) => s.runs?.length > 1)) button("Single runs", (b) => { this.single = !this.single; b.setAttribute("aria-pressed", String(this.single)); }, false);
      this.back = button("Whole range", () => { this.zoom = null; });
      this.legend = element("div", { class: "legend", role: "group", "aria-label": "Series: select one to isolate it" });
      host.replaceChildren(element("div", { class: "head" }, this.legend, this.tools), element("div", { class: "plot" }, this.base, this.over, this.tip), this.say);
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.over.parentNode);
    }

    positive() {
      const values = this.spec.series.flatMap((s) => [...(s.y ?? []), ...(s.points ?? []).map((p) => p.y)]).filter(Number.isFinite);
      return values.length > 1 && values.every((y) => y >= 0) && values.some((y) => y > 0);
    }

    /** New data; the selection is kept. */
    set(spec) { this.spec = spec; this.draw(); }

    entries() {
      const seen = new Map();
      for (const s of this.spec.series) if (s.name && !seen.has(s.name)) seen.set(s.name, s);
      return [...seen.values()];
    }

    isShown(s) { return (this.only === null || s.name === this.only || !s.name) && this.shown(s.name, null); }

    /** The drawn series: if runs are hidden, means are over the others. */
    visible() {
      return this.spec.series.filter((s) => this.isShown(s)).map((s) => {
        if (!s.runs?.length) return s;
        const runs = s.runs.filter((run) => this.shown(s.name, run.label));
        return runs.length === s.runs.length && s.y ? { ...s, runs } : { ...s, ...together(runs), runs };
      });
    }

    domains(list) {
      const { spec, log } = this, xs = [], ys = [];
      const zoom = this.zoom ?? [-Infinity, Infinity];
      const add = (x, ...values) => {
        if (!Number.isFinite(x) || (spec.x.log && x <= 0)) return;
        xs.push(x);
        if (x >= zoom[0] && x <= zoom[1]) for (const y of values) if (Number.isFinite(y) && (!log || y > 0)) ys.push(y);
      };
      for (const s of list) {
        s.x?.forEach((x, i) => add(x, s.y[i], s.low?.[i] ?? NaN, s.high?.[i] ?? NaN));
        s.points?.forEach((p) => add(p.x, p.y, p.low ?? NaN, p.high ?? NaN));
        if (this.single) s.runs?.forEach((run) => run.x.forEach((x, i) => add(x, run.y[i])));
      }
      for (const rule of spec.rules ?? []) if (ys.length && (!log || rule.y > 0)) ys.push(rule.y);
      if (!ys.length) return null;
      const least = (list) => list.reduce((a, b) => Math.min(a, b)), most = (list) => list.reduce((a, b) => Math.max(a, b));
      let [x0, x1] = this.zoom ?? [least(xs), most(xs)], [y0, y1] = [least(ys), most(ys)];
      if (spec.categories) [x0, x1] = [-0.5, spec.categories.length - 0.5];
      else if (!this.zoom && list.some((s) => s.points)) [x0, x1] = spec.x.log ? [x0 / 1.3, x1 * 1.3] : [x0 - (x1 - x0) * 0.05, x1 + (x1 - x0) * 0.05];
      if (x0 === x1) [x0, x1] = spec.x.log ? [x0 / 2, x1 * 2] : [x0 - 1, x1 + 1];
      if (log) [y0, y1] = y0 === y1 ? [y0 / 2, y1 * 2] : [y0 / (y1 / y0) ** 0.06, y1 * (y1 / y0) ** 0.06];
      else {
        const room = y0 === y1 ? Math.max(Math.abs(y0), 1) / 2 : (y1 - y0) * 0.05;
        [y0, y1] = [y0 >= 0 && y0 < y1 / 4 ? 0 : y0 - room, y1 + room];
      }
      return { x0, x1, y0, y1 };
    }

    draw() {
      palette = null;
      const width = this.over.parentNode.clientWidth, ratio = Math.min(window.devicePixelRatio || 1, 2);
      if (!width) return;
      for (const canvas of [this.base, this.over]) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(HEIGHT * ratio);
      }
      this.width = width;
      this.ratio = ratio;
      const list = this.list = this.visible(), context = this.base.getContext("2d"), { quiet, edge, card } = colours(), { spec } = this;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = "12px system-ui, sans-serif";
      context.clearRect(0, 0, width, HEIGHT);
      this.drawLegend();
      this.back.hidden = !this.zoom;
      const domain = this.domain = this.domains(list);
      this.over.setAttribute("aria-label", this.describe(list));
      if (!domain) {
        context.fillStyle = quiet;
        context.fillText("No series is selected.", PAD.left, HEIGHT / 2);
        return this.drawOver();
      }
      const map = (low, high, log, from, to) => (value) => {
        if (!Number.isFinite(value) || (log && value <= 0)) return NaN;
        const share = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
        return from + share * (to - from);
      };
      const X = this.X = map(domain.x0, domain.x1, spec.x.log, PAD.left, width - PAD.right);
      const Y = this.Y = map(domain.y0, domain.y1, this.log, HEIGHT - PAD.bottom, PAD.top);
      context.strokeStyle = edge;
      context.fillStyle = quiet;
      context.textAlign = "right";
      for (const tick of ticks(domain.y0, domain.y1, this.log, 6)) {
        context.beginPath();
        context.moveTo(PAD.left, Y(tick));
        context.lineTo(width - PAD.right, Y(tick));
        context.stroke();
        context.fillText(format(spec.y.unit, tick, 4), PAD.left - 6, Y(tick) + 4);
      }
      context.textAlign = "center";
      const room = (width - PAD.left - PAD.right) / Math.max(spec.categories?.length ?? 1, 1);
      const below = spec.categories
        ? spec.categories.map((name, i) => [i, name])
        : (this.zoom || !spec.x.ticks ? ticks(domain.x0, domain.x1, spec.x.log, Math.max(2, Math.floor(width / 90))) : spec.x.ticks).map((tick) => [tick, format(spec.x.unit, tick, 4)]);
      for (const [at, text] of below) {
        const short = spec.categories && context.measureText(text).width > room ? `${text.slice(0, Math.max(2, Math.floor(room / 7)))}…` : text;
        context.fillText(short, X(at), HEIGHT - 8);
      }
      context.save();
      // Without zoom everything is inside, and markers at the ends stay whole.
      if (this.zoom) {
        context.beginPath();
        context.rect(PAD.left, 0, width - PAD.left - PAD.right + 1, HEIGHT - PAD.bottom + 3);
        context.clip();
      }
      const path = (xs, ys) => {
        let joined = false;
        context.beginPath();
        for (let i = 0; i < xs.length; i++) {
          const px = X(xs[i]), py = Y(ys[i]);
          if (Number.isNaN(px) || Number.isNaN(py)) { joined = false; continue; }
          if (joined) context.lineTo(px, py); else context.moveTo(px, py);
          joined = true;
        }
      };
      for (const s of list) {
        if (!s.low || (s.many === false)) continue;
        context.fillStyle = colourOf(s.color);
        context.globalAlpha = 0.16;
        context.beginPath();
        s.x.forEach((x, i) => context.lineTo(X(x), Y(s.low[i])));
        for (let i = s.x.length - 1; i >= 0; i--) context.lineTo(X(s.x[i]), Y(s.high[i]));
        context.fill();
        context.globalAlpha = 1;
      }
      context.lineJoin = "round";
      for (const s of list) {
        context.strokeStyle = context.fillStyle = colourOf(s.color);
        context.setLineDash(s.dashed ? [6, 5] : []);
        if (this.single && s.runs?.length > 1) {
          context.lineWidth = 0.8;
          context.globalAlpha = 0.7;
          for (const run of s.runs) { path(run.x, run.y); context.stroke(); }
          context.globalAlpha = 1;
        }
        if (s.x) {
          context.lineWidth = list.length > 24 ? 1.2 : 2.2;
          path(s.x, s.y);
          context.stroke();
        }
        context.setLineDash([]);
        if (s.x) {
          // Points of a short line, and those without neighbours, which a line does not show.
          const known = (i) => Number.isFinite(s.y[i]), few = s.x.length <= FEW;
          for (let i = 0; i < s.x.length; i++) if (known(i) && (few || (!known(i - 1) && !known(i + 1)))) this.dot(context, X(s.x[i]), Y(s.y[i]), 3.5, card);
        }
        // The end of every run, to show the distribution and not only its range.
        if (s.runs?.length > 1) for (const run of s.runs) this.dot(context, X(run.x.at(-1)), Y(run.y.at(-1)), 2.5, card);
        for (const p of s.points ?? []) {
          context.strokeStyle = context.fillStyle = colourOf(p.color ?? s.color);
          if (p.low < p.high) {
            context.lineWidth = 1.5;
            context.beginPath();
            context.moveTo(X(p.x), Number.isNaN(Y(p.low)) ? HEIGHT - PAD.bottom : Y(p.low));
            context.lineTo(X(p.x), Y(p.high));
            context.stroke();
          }
          this.dot(context, X(p.x), Y(p.y), 4.5, card);
        }
      }
      context.restore();
      context.font = "600 12px system-ui, sans-serif";
      for (const rule of spec.rules ?? []) {
        const y = Y(rule.y);
        if (Number.isNaN(y)) continue;
        context.strokeStyle = colourOf(rule.color);
        context.lineWidth = 1.25;
        context.setLineDash([7, 4]);
        context.beginPath();
        context.moveTo(PAD.left, y);
        context.lineTo(width - PAD.right, y);
        context.stroke();
      }
      context.setLineDash([]);
      this.drawNames(context, list);
      this.drawOver();
    }

    /** Names of points and rules, where they cover least of what is drawn and no other name. */
    drawNames(context, list) {
      const { spec, X, Y, width } = this, taken = [], drawn = [];
      const high = 12, inside = (box) => box.left >= PAD.left && box.right <= width - 2 && box.top >= 0 && box.bottom <= HEIGHT - PAD.bottom;
      const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      const free = (box) => inside(box) && !taken.some((other) => meets(box, other));
      const write = (text, box, color) => {
        taken.push(box);
        context.textAlign = "left";
        context.fillStyle = colourOf(color);
        context.fillText(text, box.left, box.bottom - 2);
      };
      for (const s of list) {
        // Places along a line, closer than a letter is wide.
        let before = null;
        (s.x ?? []).forEach((x, i) => {
          const here = [X(x), Y(s.y[i])], known = here.every(Number.isFinite);
          if (known) {
            const parts = before ? Math.min(Math.ceil(Math.hypot(here[0] - before[0], here[1] - before[1]) / 4), 400) : 1;
            for (let n = 1; n <= parts; n++) drawn.push(before ? [before[0] + ((here[0] - before[0]) * n) / parts, before[1] + ((here[1] - before[1]) * n) / parts] : here);
          }
          before = known ? here : null;
        });
        for (const p of s.points ?? []) {
          const [x, y] = [X(p.x), Y(p.y)];
          drawn.push([x, y]);
          taken.push({ left: x - 4.5, right: x + 4.5, top: y - 4.5, bottom: y + 4.5 });
        }
      }
      for (const s of list) for (const p of s.points ?? []) {
        if (!p.name || spec.categories || !Number.isFinite(X(p.x)) || !Number.isFinite(Y(p.y))) continue;
        const long = context.measureText(p.name).width, x = X(p.x), y = Y(p.y), choices = [];
        // Beside the point, then in rows above and below it, on either side and in the middle.
        for (let row = 0; row < 8; row++) for (const rows of row ? [-row, row] : [0]) {
          const base = y + 6 + rows * (high + 3);
          for (const left of [x + 8, x - 8 - long, ...(row ? [x - long / 2] : [])]) choices.push({ left, right: left + long, top: base - high, bottom: base });
        }
        // A name without room is shown when its point is pointed at.
        const box = choices.find(free);
        if (box) write(p.name, box, p.color ?? s.color);
      }
      for (const rule of spec.rules ?? []) {
        const y = Y(rule.y), long = context.measureText(rule.label).width;
        if (Number.isNaN(y) || !rule.label) continue;
        const choices = [];
        for (let i = 0; i <= 8; i++) for (const base of [y - 3, y + high + 3]) {
          const left = width - PAD.right - long - ((width - PAD.left - PAD.right - long) * i) / 8;
          choices.push({ left, right: left + long, top: base - high, bottom: base });
        }
        const others = (spec.rules ?? []).map((other) => Y(other.y)).filter((other) => other !== y);
        const covered = (box) =>
          drawn.filter(([a, b]) => a > box.left - 4 && a < box.right + 4 && b > box.top - 2 && b < box.bottom + 2).length +
          others.filter((other) => other > box.top - 1 && other < box.bottom + 1).length + (free(box) ? 0 : 1e6);
        write(rule.label, choices.reduce((best, box) => (covered(box) < covered(best) ? box : best)), rule.color);
      }
    }

    dot(context, x, y, radius, edge) {
      if (Number.isNaN(x) || Number.isNaN(y)) return;
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.fill();
      const stroke = context.strokeStyle;
      context.strokeStyle = edge;
      context.lineWidth = 1;
      context.stroke();
      context.strokeStyle = stroke;
    }

    drawLegend() {
      const entries = this.entries(), key = entries.map((s) => `${s.name}|${s.color}|${s.dashed}`).join("\n");
      if (key !== this.legendKey) {
        this.legendKey = key;
        this.legend.replaceChildren(...(entries.length > 1 || entries.some((s) => s.name) ? entries : []).map((s) => {
          const sample = element("i", { class: `sample${s.dashed ? " dashed" : ""}${s.points ? " point" : ""}`, "aria-hidden": "true" });
          sample.style.color = colourOf(s.color);
          const button = element("button", { type: "button" }, sample, s.name);
          button.addEventListener("click", () => { this.only = this.only === s.name ? null : s.name; this.draw(); });
          return button;
        }));
      }
      [...this.legend.children].forEach((button, i) => {
        const s = entries[i];
        button.setAttribute("aria-pressed", String(this.only === s.name));
        button.classList.toggle("faint", !this.isShown(s));
        button.firstChild.style.color = colourOf(s.color);
      });
    }

    describe(list) {
      const { y } = this.spec, last = (s) => (s.x?.length ? `${s.name || "series"} ends at ${format(y.unit, s.y.at(-1), 4)}` : null);
      const said = list.slice(0, 8).map(last).filter(Boolean).join(", ");
      return `${this.label}. ${said}. Arrow keys read values, plus and minus zoom.`;
    }

    /** Values at one x: name, colour and text of every series, nearest to the pointer first. */
    at(x) {
      const rows = [];
      for (const s of this.list) {
        if (s.x?.length) {
          const i = nearest(s.x, x);
          const band = s.low && s.high[i] > s.low[i] ? ` (${format(this.spec.y.unit, s.low[i], 4)} to ${format(this.spec.y.unit, s.high[i], 4)})` : "";
          const known = Number.isFinite(s.y[i]);
          if (known || band) rows.push({ s, x: s.x[i], y: known ? s.y[i] : s.high[i], text: (known ? format(this.spec.y.unit, s.y[i]) : "") + band });
        }
        if (s.points?.length) {
          const p = s.points.reduce((best, p) => (Math.abs(this.X(p.x) - this.X(x)) < Math.abs(this.X(best.x) - this.X(x)) ? p : best));
          const band = p.low < p.high ? ` (${format(this.spec.y.unit, p.low, 4)} to ${format(this.spec.y.unit, p.high, 4)})` : "";
          rows.push({ s: { ...s, color: p.color ?? s.color, name: p.name || s.name }, x: p.x, y: p.y, text: format(this.spec.y.unit, p.y) + band });
        }
      }
      return rows;
    }

    point(px, py) {
      if (!this.domain) return;
      const { x0, x1 } = this.domain, share = Math.min(Math.max((px - PAD.left) / (this.width - PAD.left - PAD.right), 0), 1);
      const x = this.spec.x.log ? x0 * (x1 / x0) ** share : x0 + share * (x1 - x0);
      let rows = this.at(x);
      if (!rows.length) return;
      const close = rows.reduce((best, row) => (Math.abs(row.x - x) < Math.abs(best.x - x) ? row : best)).x;
      rows = rows.filter((row) => Math.abs(this.X(row.x) - this.X(close)) < 12).sort((a, b) => Math.abs(this.Y(a.y) - py) - Math.abs(this.Y(b.y) - py));
      this.cursor = { x: close, rows };
      this.drawOver();
    }

    drawOver() {
      const context = this.over.getContext("2d");
      context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      context.clearRect(0, 0, this.width, HEIGHT);
      if (this.drag) {
        context.fillStyle = colours().quiet;
        context.globalAlpha = 0.2;
        context.fillRect(Math.min(...this.drag), PAD.top, Math.abs(this.drag[1] - this.drag[0]), HEIGHT - PAD.top - PAD.bottom);
        context.globalAlpha = 1;
      }
      if (!this.cursor || !this.domain) { this.tip.hidden = true; return; }
      const { x, rows } = this.cursor, px = this.X(x);
      context.strokeStyle = colours().quiet;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(px, PAD.top);
      context.lineTo(px, HEIGHT - PAD.bottom);
      context.stroke();
      context.setLineDash([]);
      for (const row of rows) { context.fillStyle = colourOf(row.s.color); this.dot(context, px, this.Y(row.y), 4, colours().card); }
      const most = 12, name = this.spec.categories?.[x] ?? `${this.spec.x.label || "x"} ${format(this.spec.x.unit, x)}`;
      const line = (row) => {
        const sample = element("i", { class: "sample point" });
        sample.style.color = colourOf(row.s.color);
        return element("div", {}, sample, `${row.s.name ? `${row.s.name}: ` : ""}${row.text}`);
      };
      this.tip.replaceChildren(element("b", {}, name), ...rows.slice(0, most).map(line), ...(rows.length > most ? [element("div", {}, `and ${rows.length - most} more`)] : []));
      this.tip.hidden = false;
      this.tip.style.left = px > this.width / 2 ? "auto" : `${px + 12}px`;
      this.tip.style.right = px > this.width / 2 ? `${this.width - px + 12}px` : "auto";
    }

    zoomTo(a, b) {
      const { x0, x1 } = this.domain, at = (px) => {
        const share = Math.min(Math.max((px - PAD.left) / (this.width - PAD.left - PAD.right), 0), 1);
        return this.spec.x.log ? x0 * (x1 / x0) ** share : x0 + share * (x1 - x0);
      };
      this.zoom = [at(Math.min(a, b)), at(Math.max(a, b))];
      this.draw();
    }

    listen() {
      const place = (event) => { const box = this.over.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
      this.over.addEventListener("pointerdown", (event) => {
        if (event.button !== 0 || event.pointerType === "touch" || this.spec.categories || !this.domain) return;
        this.drag = [place(event)[0], place(event)[0]];
        this.over.setPointerCapture(event.pointerId);
      });
      this.over.addEventListener("pointermove", (event) => {
        const [x, y] = place(event);
        if (this.drag) { this.drag[1] = x; this.drawOver(); } else this.point(x, y);
      });
      this.over.addEventListener("pointerup", () => {
        const drag = this.drag;
        this.drag = null;
        if (drag && Math.abs(drag[1] - drag[0]) > 8) this.zoomTo(...drag); else this.drawOver();
      });
      this.over.addEventListener("pointerleave", () => { this.cursor = null; if (!this.drag) this.drawOver(); });
      this.over.addEventListener("dblclick", () => { this.zoom = null; this.draw(); });
      this.over.addEventListener("blur", () => { this.cursor = null; this.drawOver(); });
      this.over.addEventListener("keydown", (event) => {
        if (!this.domain) return;
        const middle = this.cursor ? this.X(this.cursor.x) : (PAD.left + this.width - PAD.right) / 2;
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (move) {
          const xs = [...new Set(this.list.flatMap((s) => [...(s.x ?? []), ...(s.points ?? []).map((p) => p.x)]))].sort((a, b) => a - b).filter((x) => x >= this.domain.x0 && x <= this.domain.x1);
          if (!xs.length) return;
          const now = this.cursor ? nearest(xs, this.cursor.x) : (move > 0 ? -1 : xs.length);
          const x = xs[Math.min(Math.max(now + move, 0), xs.length - 1)];
          this.point(this.X(x), HEIGHT / 2);
          const { rows } = this.cursor;
          this.say.textContent = `${this.spec.categories?.[x] ?? `${this.spec.x.label} ${format(this.spec.x.unit, x)}`}: ${rows.slice(0, 12).map((row) => `${row.s.name} ${row.text}`).join(", ")}`;
        } else if (event.key === "+" && !this.spec.categories) {
          const quarter = (this.width - PAD.left - PAD.right) / 4;
          this.zoomTo(middle - quarter, middle + quarter);
        } else if (event.key === "-" || event.key === "Escape") {
          this.zoom = null;
          this.cursor = null;
          this.draw();
        } else return;
        event.preventDefault();
      });
    }
  }

  // ---- Reports with figures ----------------------------------------------------------------------------------------------------------------

  const plots = [], left = new Set();
  const key = (series, run) => `${series}\n${run ?? ""}`;
  const shown = (series, run) => !left.has(key(series, null)) && (run === null || !left.has(key(series, run)));

  /** Tooltips of heat maps and other static SVG, from their titles. */
  function tips(figure) {
    const tip = element("div", { class: "tip", hidden: "" });
    figure.append(tip);
    figure.addEventListener("pointermove", (event) => {
      const title = event.target.closest?.("svg *")?.querySelector(":scope > title");
      tip.hidden = !title;
      if (!title) return;
      const box = figure.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      tip.textContent = title.textContent;
      tip.style.left = x > box.width / 2 ? "auto" : `${x + 14}px`;
      tip.style.right = x > box.width / 2 ? `${box.width - x + 14}px` : "auto";
      tip.style.top = `${y + 14}px`;
    });
    figure.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  /** A figure shown as static SVG, on a linear or log scale. */
  function logSwitch(figure) {
    const other = figure.querySelector(":scope > .in-log"), still = figure.querySelector(":scope > svg");
    if (!other) return;
    const button = element("button", { type: "button", "aria-pressed": "false" }, "Log");
    button.addEventListener("click", () => {
      other.hidden = !other.hidden;
      still.style.display = other.hidden ? "" : "none";
      button.setAttribute("aria-pressed", String(!other.hidden));
    });
    still.before(element("div", { class: "tools" }, button));
  }

  /** Check boxes for all runs, which show and hide them in all figures. */
  function table(into, figures) {
    const runs = new Map();
    for (const { panels } of figures) for (const { series } of panels) for (const s of series) {
      if (!s.runs?.length) continue;
      const known = runs.get(s.name) ?? runs.set(s.name, { color: s.color, labels: new Set() }).get(s.name);
      s.runs.forEach((run) => known.labels.add(run.label));
    }
    if (runs.size < 2) return;
    const box = (series, run, text) => {
      const input = element("input", { type: "checkbox", checked: "" });
      input.addEventListener("change", () => {
        if (input.checked) left.delete(key(series, run)); else left.add(key(series, run));
        plots.forEach((plot) => plot.draw());
      });
      return element("label", {}, input, text);
    };
    const body = element("tbody", {}, ...[...runs].map(([name, { color, labels }]) => {
      const sample = element("i", { class: "sample" });
      sample.style.color = `var(--s${indexOf(color)})`;
      return element("tr", {}, element("th", { scope: "row" }, box(name, null, element("span", {}, sample, name))),
        element("td", {}, ...[...labels].map((label) => box(name, label, label))));
    }));
    const head = element("thead", {}, element("tr", {}, element("th", {}, "variant"), element("th", {}, "runs")));
    into.append(element("details", { class: "choose" }, element("summary", {}, "Select runs"), element("div", { class: "scroll" }, element("table", {}, head, body))));
  }

  function enhance() {
    const data = JSON.parse(document.getElementById("data")?.textContent ?? "{}").figures ?? {};
    for (const [id, { title, panels }] of Object.entries(data)) {
      const figure = document.getElementById(id), still = figure?.querySelector("svg");
      if (!still) continue;
      if (!panels) { tips(figure); logSwitch(figure); continue; }
      const live = element("div", { class: "live" }, element("p", { class: "name" }, title));
      for (const panel of panels) {
        const host = element("div", { class: "panel" });
        live.append(element("p", { class: "panel-name" }, [panel.title, panel.y.label].filter(Boolean).join(", ")), host);
        if (panel.x.label) live.append(element("p", { class: "panel-x" }, panel.x.label));
        plots.push(new Plot(host, panel, { shown, label: `${title}: ${panel.title}` }));
      }
      still.before(live);
      figure.classList.add("answers");
    }
    const place = document.getElementById("choose");
    if (place) table(place, Object.values(data).filter((figure) => figure.panels));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.draw()));
    document.addEventListener("toggle", () => plots.forEach((plot) => plot.draw()), true);
  }

  return { Plot, enhance, format, together, element };
})();
if (typeof document !== "undefined" && document.getElementById("data") && !document.body.dataset.own) Figures.enhance();
