// What the tests ask about how the page looks.  It runs before the page's own scripts.
"use strict";

// Notes where each canvas has text, and forgets it when the canvas is cleared.
{
  const drawn = CanvasRenderingContext2D.prototype, write = drawn.fillText, clear = drawn.clearRect;
  drawn.clearRect = function (...box) {
    this.canvas.labels = [];
    clear.apply(this, box);
  };
  drawn.fillText = function (text, x, y) {
    const size = this.measureText(text), at = this.getTransform().transformPoint(new DOMPoint(x, y));
    const left = at.x - ({ center: size.width / 2, right: size.width, end: size.width }[this.textAlign] || 0);
    const [top, bottom] = [at.y - size.actualBoundingBoxAscent, at.y + size.actualBoundingBoxDescent];
    (this.canvas.labels ||= []).push({ text, left, right: left + size.width, top, bottom });
    write.call(this, text, x, y);
  };
}

const looks = {
  all: (selector) => [...document.querySelectorAll(selector)],

  // Elements whose content is wider than they are, and which are not marked as boxes that scroll.
  overflowing: () => [document.documentElement, ...looks.all("body, body *")]
    .filter((it) => it.clientWidth && it.scrollWidth > it.clientWidth + 1)
    .filter((it) => !it.hasAttribute("data-scrolls") && getComputedStyle(it).display !== "inline")
    .map((it) => `${it.tagName}#${it.id}.${it.className}: ${it.scrollWidth} > ${it.clientWidth}`),

  // Boxes that scroll without the line above them that tells so, a name, or the focus.
  unmarked: () => looks.all("[data-scrolls]")
    .filter((it) => it.clientWidth && (it.scrollWidth > it.clientWidth + 1 || it.scrollHeight > it.clientHeight + 1))
    .filter((it) => it.tabIndex !== 0 || !it.ariaLabel || it.previousElementSibling.hidden ||
      !it.previousElementSibling.textContent.includes("scrolls"))
    .map((it) => it.id),

  times: (canvas) => canvas.labels.map((it) => it.text).filter((text) => text.includes(":")),

  // Texts on the charts that touch one another, or are cut by the edge of their canvas.
  clashing: () => looks.all(".chart canvas").flatMap((canvas) => {
    const beside = (a, b) => a.right + 2 < b.left || b.right + 2 < a.left;
    const apart = (a, b) => beside(a, b) || a.bottom < b.top || b.bottom < a.top;
    const cut = (a) => a.left < 0 || a.right > canvas.width || a.top < 0 || a.bottom > canvas.height;
    return canvas.labels.flatMap((a, index) => [
      ...(cut(a) ? [`${a.text} is cut`] : []),
      ...canvas.labels.slice(index + 1).filter((b) => !apart(a, b)).map((b) => `${a.text} on ${b.text}`),
    ]);
  }),

  // [texts, samples of legends, those of both with too little contrast to what lies behind them], by
  // the Web Content Accessibility Guidelines 2.1, 1.4.3 and 1.4.11.
  contrast() {
    const seen = (it) => it.getClientRects().length > 0 && !it.closest(".off, .skip, [hidden]");
    const worded = (it) => [...it.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const texts = looks.all("body *").filter((it) => seen(it) && worded(it))
      .map((it) => [it, ratio(getComputedStyle(it).color, it), 4.5]);
    const samples = looks.all(".swatch").filter(seen)
      .map((it) => [it, ratio(getComputedStyle(it).borderTopColor, it.parentElement), 3]);
    const pale = [...texts, ...samples].filter(([, is, least]) => is < least);
    return [texts.length, samples.length,
      pale.map(([it, is]) => `${it.tagName}.${it.className} ${it.textContent.slice(0, 30)}: ${is.toFixed(2)}`)];
  },

  // Samples of the legends whose colour is not among those that their chart is drawn with.
  unlike: () => looks.all(".chart").flatMap((chart) => {
    const canvas = chart.querySelector("canvas");
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    const drawn = new Set();
    for (let at = 0; at < data.length; at += 4) drawn.add(`rgb(${data.slice(at, at + 3).join(", ")})`);
    return [...chart.nextElementSibling.querySelectorAll(".swatch:not(.alone)")]
      .filter((it) => !drawn.has(getComputedStyle(it).borderTopColor)).map((it) => it.className);
  }),
};

function ratio(colour, element) {
  const [a, b] = [luminance(parts(colour)), luminance(ground(element))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}

// Of "rgb(1, 2, 3)" or "rgba(1, 2, 3, 0.5)".
const parts = (colour) => colour.match(/[\d.]+/g).map(Number);

function ground(element) {
  if (!element) return [255, 255, 255];
  const [top, under] = [parts(getComputedStyle(element).backgroundColor), ground(element.parentElement)];
  const alpha = top[3] ?? 1;
  return under.map((value, index) => alpha * top[index] + (1 - alpha) * value);
}

function luminance(colour) {
  const linear = colour.slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return linear.reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
}
