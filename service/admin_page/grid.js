// A grid of cells on a canvas, one for each frame or slot. Pixels are written into one buffer, and the rows that have
// changed go to the canvas once a display frame: 100,000 cells are a few hundred thousand pixels, some milliseconds.

import { color } from "./dom.js";

const LARGEST_CELL = 20; // in device pixels, as all sizes here
const SMALLEST_CELL = 2;
const GAP_FROM = 5; // cells of this size and above are told apart by a line

export class Grid {
  /** kinds: names of colours, by what colourOf(i) returns. */
  constructor(canvas, kinds, colourOf) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.kinds = kinds;
    this.colourOf = colourOf;
    this.cells = 0;
    this.marked = null; // (cells,) bytes: the others are drawn faintly
    this.selected = -1;
    this.box = canvas.parentElement;
    this.cursor = this.box.querySelector(".cursor");
    this.dirtyFrom = Infinity;
    this.dirtyTo = -1;
    this.isPlanned = false;
    this.readColours();
    new ResizeObserver(() => this.layOut()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.readColours();
      this.paintAll();
    });
  }

  readColours() {
    const probe = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const rgb = (name) => {
      probe.fillStyle = color(name);
      probe.fillRect(0, 0, 1, 1);
      return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    const ground = rgb("--map-ground");
    const faint = (colour) => colour.map((part, i) => Math.round(0.18 * part + 0.82 * ground[i]));
    const found = this.kinds.map(rgb);
    this.colours = Uint32Array.from(found, packed);
    this.faintColours = Uint32Array.from(found, (colour) => packed(faint(colour)));
    this.ground = packed(ground);
  }

  resize(cells) {
    if (cells === this.cells) return;
    this.cells = cells;
    this.marked = null;
    this.layOut();
  }

  /** As large cells as fit into the box; where the smallest do not, the box scrolls. */
  layOut() {
    const ratio = devicePixelRatio || 1;
    const width = Math.floor(this.box.clientWidth * ratio);
    const height = Math.floor(this.box.clientHeight * ratio);
    if (!width || !this.cells) return;
    let cell = LARGEST_CELL;
    while (cell > SMALLEST_CELL && Math.ceil(this.cells / Math.floor(width / cell)) * cell > height) cell--;
    this.cell = cell;
    this.side = cell >= GAP_FROM ? cell - 1 : cell; // of what is painted of it
    this.columns = Math.max(1, Math.floor(width / cell));
    this.rows = Math.ceil(this.cells / this.columns);
    this.canvas.width = this.columns * cell;
    this.canvas.height = this.rows * cell;
    this.canvas.style.width = `${this.canvas.width / ratio}px`;
    this.canvas.style.height = `${this.canvas.height / ratio}px`;
    this.scale = cell / ratio; // of a cell, in CSS pixels
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer).fill(this.ground);
    this.paintAll();
    this.showCursor();
  }

  /** Each row of cells is a line of pixels, made once and copied: a tenth of what cell by cell takes. */
  paintAll() {
    if (!this.pixels) return;
    const { cell, columns, pixels, cells, side } = this;
    const width = columns * cell;
    pixels.fill(this.ground);
    for (let row = 0; row < this.rows; row++) {
      const top = row * cell * width;
      const end = Math.min(cells, (row + 1) * columns);
      for (let i = row * columns, at = top; i < end; i++, at += cell) {
        const colour = this.paintOf(i);
        for (let x = at; x < at + side; x++) pixels[x] = colour;
      }
      for (let y = 1; y < side; y++) pixels.copyWithin(top + y * width, top, top + width);
    }
    this.plan(0, this.rows - 1);
  }

  /** Cell i has changed. */
  paint(i) {
    if (!this.pixels) return;
    const { cell, columns, pixels, side } = this;
    const row = Math.floor(i / columns);
    const width = columns * cell;
    const colour = this.paintOf(i);
    let at = row * cell * width + (i - row * columns) * cell;
    for (let y = 0; y < side; y++, at += width) for (let x = at; x < at + side; x++) pixels[x] = colour;
    this.plan(row, row);
  }

  paintOf(i) {
    const kind = this.colourOf(i);
    return this.marked !== null && !this.marked[i] ? this.faintColours[kind] : this.colours[kind];
  }

  /** Rows first ... last have changed. */
  plan(first, last) {
    if (first < this.dirtyFrom) this.dirtyFrom = first;
    if (last > this.dirtyTo) this.dirtyTo = last;
    if (this.isPlanned) return;
    this.isPlanned = true;
    requestAnimationFrame(() => {
      this.isPlanned = false;
      const top = this.dirtyFrom * this.cell;
      const height = (this.dirtyTo - this.dirtyFrom + 1) * this.cell;
      this.dirtyFrom = Infinity;
      this.dirtyTo = -1;
      if (height > 0) this.context.putImageData(this.image, 0, 0, 0, top, this.canvas.width, height);
    });
  }

  /** Draw all but these faintly; null: none. */
  mark(marked) {
    this.marked = marked;
    this.paintAll();
  }

  /** The cell under a mouse event; -1: none. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.scale);
    const row = Math.floor((event.clientY - box.top) / this.scale);
    const i = row * this.columns + column;
    return column >= 0 && column < this.columns && i >= 0 && i < this.cells ? i : -1;
  }

  select(i) {
    this.selected = i;
    this.showCursor();
  }

  showCursor() {
    const i = this.selected;
    this.cursor.hidden = i < 0 || i >= this.cells;
    if (this.cursor.hidden) return;
    const row = Math.floor(i / this.columns);
    const left = (i - row * this.columns) * this.scale;
    const side = this.scale * (1 - (this.cell >= GAP_FROM ? 1 / this.cell : 0));
    Object.assign(this.cursor.style, {
      transform: `translate(${left}px, ${row * this.scale}px)`,
      width: `${side}px`,
      height: `${side}px`,
    });
  }

  /** Where an arrow key leads from the selected cell; -1: it is no such key. */
  step(key) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (key === "Home") return 0;
    if (key === "End") return this.cells - 1;
    if (!(key in steps) || !this.cells) return -1;
    if (this.selected < 0) return 0;
    return Math.max(0, Math.min(this.cells - 1, this.selected + steps[key]));
  }
}
