/* A few shapes for `render`: without anti-aliasing, clipped at the edges of the image. */
#ifndef MEMLANE_DRAW_H
#define MEMLANE_DRAW_H

#include <stdint.h>

typedef struct memlane_canvas {
    uint8_t *rgb; /* rows of pixels of red, green, blue */
    int width, height;
} memlane_canvas;

/* `value` as an integer from 0 to `high`; NaN becomes 0. */
static inline int memlane_clip(double value, int high) { return !(value > 0) ? 0 : value > high ? high : (int)value; }

static inline void memlane_rectangle(memlane_canvas canvas, double left, double top, double right, double bottom,
                                     uint8_t red, uint8_t green, uint8_t blue) {
    const int first = memlane_clip(left, canvas.width), last = memlane_clip(right, canvas.width);
    for (int y = memlane_clip(top, canvas.height); y < memlane_clip(bottom, canvas.height); ++y)
        for (int x = first; x < last; ++x) {
            uint8_t *pixel = canvas.rgb + 3 * ((int64_t)y * canvas.width + x);
            pixel[0] = red, pixel[1] = green, pixel[2] = blue;
        }
}

static inline void memlane_fill(memlane_canvas canvas, uint8_t red, uint8_t green, uint8_t blue) {
    memlane_rectangle(canvas, 0, 0, canvas.width, canvas.height, red, green, blue);
}

/* A line with round ends. A disc if both ends are the same. */
static inline void memlane_line(memlane_canvas canvas, double x0, double y0, double x1, double y1, double width, uint8_t red,
                                uint8_t green, uint8_t blue) {
    const double dx = x1 - x0, dy = y1 - y0, length2 = dx * dx + dy * dy, reach = width / 2;
    const int left = memlane_clip((x0 < x1 ? x0 : x1) - reach, canvas.width);
    const int right = memlane_clip((x0 < x1 ? x1 : x0) + reach + 1, canvas.width);
    const int bottom = memlane_clip((y0 < y1 ? y1 : y0) + reach + 1, canvas.height);
    for (int y = memlane_clip((y0 < y1 ? y0 : y1) - reach, canvas.height); y < bottom; ++y)
        for (int x = left; x < right; ++x) {
            /* The nearest point of the line is at the fraction `along` of the way from one end to the other. */
            const double px = x + 0.5 - x0, py = y + 0.5 - y0;
            double along = length2 > 0 ? (px * dx + py * dy) / length2 : 0;
            along = along < 0 ? 0 : along > 1 ? 1 : along;
            const double ex = px - along * dx, ey = py - along * dy;
            if (ex * ex + ey * ey <= reach * reach)
                memlane_rectangle(canvas, x, y, x + 1, y + 1, red, green, blue);
        }
}

static inline void memlane_disc(memlane_canvas canvas, double x, double y, double radius, uint8_t red, uint8_t green,
                                uint8_t blue) {
    memlane_line(canvas, x, y, x, y, 2 * radius, red, green, blue);
}

#endif
