// Scales of colours. Both are monotone in lightness, so that they can be read without seeing hues: more weight is
// farther from the page's background. YlGnBu and the diverging pair follow ColorBrewer, the dark scale is viridis.

const SEQUENTIAL = {
  light: "ffffd9 edf8b1 c7e9b4 7fcdbb 41b6c4 1d91c0 225ea8 253494 081d58",
  dark: "440154 482878 3e4989 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725",
};
const DIVERGING = {
  light: "053061 2166ac 4393c3 a6d0e4 f7f7f7 fdc98a e08214 b35806 7f3b08",
  dark: "9fd3ff 58a6ea 2f6fae 24486b 303237 6b4620 ad6a1f e8953a ffc680",
};
const HIDDEN = { light: "e9ebee", dark: "26292e" };
const BROKEN = { light: "c8102e", dark: "ff5a5f" }; // NaN and infinity
const LEVELS = 255;
const DECADES = 4; // of the logarithmic scale

const channels = (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));

function colourTable(stops) {
  const points = stops.split(" ").map(channels);
  return Array.from({ length: LEVELS + 1 }, (_, level) => {
    const place = (level / LEVELS) * (points.length - 1);
    const below = Math.min(Math.floor(place), points.length - 2);
    return points[below].map((c, i) => Math.round(c + (points[below + 1][i] - c) * (place - below)));
  });
}

// WCAG's relative luminance.
function luminance([red, green, blue]) {
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
}

// Colours of numbers. A level is an index into the tables: 0 to 255, HIDDEN_LEVEL or BROKEN_LEVEL.
const HIDDEN_LEVEL = LEVELS + 1;
const BROKEN_LEVEL = LEVELS + 2;

class Scale {
  constructor({ low, high, log, theme, diverging, zeroIsHidden = true }) {
    this.diverging = diverging ?? low < 0;
    this.log = log;
    this.zeroIsHidden = zeroIsHidden;
    this.low = this.diverging || zeroIsHidden ? 0 : low;
    this.high = this.diverging ? Math.max(Math.abs(low), Math.abs(high)) : high;
    this.span = this.high > this.low ? this.high - this.low : 1;
    const table = colourTable((this.diverging ? DIVERGING : SEQUENTIAL)[theme]);
    table.push(channels(HIDDEN[theme]), channels(BROKEN[theme]));
    this.css = table.map(([r, g, b]) => `rgb(${r} ${g} ${b})`);
    this.ink = table.map((colour) => (luminance(colour) > 0.179 ? "#000" : "#fff"));
    this.packed = Uint32Array.from(table, ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
  }

  level(x) {
    if (x === -Infinity || (x === 0 && this.zeroIsHidden)) return HIDDEN_LEVEL;
    if (!Number.isFinite(x)) return BROKEN_LEVEL;
    let part = (Math.abs(x - this.low)) / this.span;
    if (!this.diverging && x < this.low) part = 0;
    if (this.log) part = part > 0 ? 1 + Math.log10(part) / DECADES : 0;
    part = Math.min(Math.max(part, 0), 1);
    if (this.diverging) part = 0.5 + (x < 0 ? -part : part) / 2;
    return Math.round(part * LEVELS);
  }

  // A bar of all colours as a CSS background, and the numbers under its ends.
  legend() {
    const stops = Array.from({ length: 17 }, (_, i) => this.css[Math.round((i / 16) * LEVELS)]);
    const least = this.low + this.span * 10 ** -DECADES;
    const first = this.diverging ? -this.high : this.log ? least : this.low;
    return { background: `linear-gradient(to right, ${stops.join(", ")})`, ends: [first, this.low + this.span] };
  }
}
