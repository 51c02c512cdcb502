// Line charts of the last minutes, drawn as SVG. Stores the points.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 100;
const MIN_SPAN_S = 60;
const MAX_SPAN_S = 300;

function svg(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** Return the next round number that is not below `value`, so that the scale rarely changes. */
function roundedUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((end) => end >= value * 0.999999);
}

export class Chart {
  /** `names` of up to three lines; `format` returns a value as text; `top` of the scale, if fixed. */
  constructor(title, names, format, top = null) {
    this.top = top;
    this.names = names;
    this.format = format;
    this.points = [];
    this.title = title;
    this.element = document.createElement("figure");
    this.element.className = "panel";
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    this.scale = document.createElement("span");
    this.scale.className = "count";
    caption.append(this.scale);
    this.picture = svg("svg", {
      class: "chart", role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none",
    });
    for (const y of [0, HEIGHT / 2, HEIGHT]) {
      this.picture.append(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    }
    this.lines = names.map((_, index) => svg("path", { class: `line-${index}` }));
    this.picture.append(...this.lines);
    const legend = document.createElement("ul");
    legend.className = "legend";
    this.values = names.map((name, index) => {
      const item = document.createElement("li");
      item.className = `line-${index}`;
      const value = document.createElement("b");
      item.append(`${name} `, value);
      legend.append(item);
      return value;
    });
    this.element.append(caption, this.picture, legend);
  }

  /** Add a value for each line at `time_s`; null where there is none. */
  add(time_s, values) {
    this.points.push({ time_s, values });
    while (this.points.length && this.points[0].time_s < time_s - MAX_SPAN_S) this.points.shift();
    this.draw(time_s);
  }

  draw(now_s) {
    const all = this.points.flatMap((point) => point.values.filter((value) => value !== null));
    const top = this.top ?? roundedUp(Math.max(0, ...all));
    this.scale.textContent = all.length ? `0 to ${this.format(top)}` : "";
    const span_s = Math.max(MIN_SPAN_S, now_s - this.points[0].time_s);
    const labels = [];
    this.lines.forEach((line, index) => {
      line.setAttribute("d", this.path(index, now_s, span_s, top));
      const last = this.points[this.points.length - 1].values[index];
      this.values[index].textContent = this.format(last);
      labels.push(`${this.names[index]} ${this.format(last)}`);
    });
    this.picture.setAttribute("aria-label", `${this.title}: ${labels.join(", ")}`);
  }

  path(index, now_s, span_s, top) {
    let path = "";
    let isDrawing = false;
    for (const point of this.points) {
      const value = point.values[index];
      if (value === null) {
        isDrawing = false;
        continue;
      }
      const x = WIDTH * (1 - (now_s - point.time_s) / span_s);
      const y = HEIGHT * (1 - value / top);
      path += `${isDrawing ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`;
      isDrawing = true;
    }
    return path;
  }
}
