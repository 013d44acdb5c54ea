//! Long columns made short: smoothing, and for each pixel column of a plot the first, least, greatest and
//! last value. What was made is kept until the data, the zoom or the smoothing change.

use egui_plot::PlotPoint;

/// How a column is wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Want {
    /// Tells numbers that were replaced from those that only grew.
    pub generation: u64,
    /// Which columns, as a number.
    pub columns: u8,
    /// Weight of the past, 0 to below 1.
    pub smooth: f64,
    /// Whether x is drawn as its logarithm.
    pub log_x: bool,
    /// Whether y is drawn as its logarithm.
    pub log_y: bool,
    /// The part of x that is visible, in drawn coordinates (logarithms where `log_x`); `None` is all.
    pub range: Option<(f64, f64)>,
    /// Pixel columns.
    pub width: usize,
}

/// Points of a column as last drawn.
#[derive(Debug, Default)]
pub(crate) struct Series {
    made: Option<(Want, usize)>,
    points: Vec<PlotPoint>,
    smooth: Smooth,
    blocks: Blocks,
}

impl Series {
    /// The points to draw, made anew only if they are wanted differently than last time.
    pub fn points(&mut self, x: &[f64], y: &[f64], want: Want) -> &[PlotPoint] {
        if self.made != Some((want, y.len())) {
            let y = if want.smooth > 0.0 {
                self.smooth.extend(y, want);
                &self.smooth.out
            } else {
                y
            };
            self.points.clear();
            self.blocks.extend(y, want);
            decimate(x, y, want, &self.blocks, &mut self.points);
            self.made = Some((want, y.len()));
        }
        &self.points
    }

    /// What was made last.
    pub fn drawn(&self) -> &[PlotPoint] {
        &self.points
    }
}

/// An exponential moving average that starts unbiased: (1 − β) Σ β^(t−i) y_i / (1 − β^t).
#[derive(Debug, Default)]
struct Smooth {
    of: Option<(u64, u8, f64)>,
    out: Vec<f64>,
    sum: f64,
    weight: f64,
}

impl Smooth {
    fn extend(&mut self, y: &[f64], want: Want) {
        let of = Some((want.generation, want.columns, want.smooth));
        if self.of != of || self.out.len() > y.len() {
            *self = Smooth { of, ..Smooth::default() };
        }
        let b = want.smooth;
        for &v in &y[self.out.len()..] {
            if v.is_finite() {
                self.sum = b * self.sum + (1.0 - b) * v;
                self.weight = b * self.weight + (1.0 - b);
            }
            self.out.push(if self.weight > 0.0 { self.sum / self.weight } else { v });
        }
    }
}

/// Values in a block.
const BLOCK: usize = 128;

/// For each block of values the indices of the first, least, greatest and last that can be drawn, so that a
/// zoom over a long column does not look at every value of it.
#[derive(Debug, Default)]
struct Blocks {
    of: Option<(u64, u8, f64, bool)>,
    /// Of whole blocks only.
    some: Vec<Option<[usize; 4]>>,
}

impl Blocks {
    fn extend(&mut self, y: &[f64], want: Want) {
        let of = Some((want.generation, want.columns, want.smooth, want.log_y));
        if self.of != of || self.some.len() > y.len() / BLOCK {
            *self = Blocks { of, ..Blocks::default() };
        }
        for b in self.some.len()..y.len() / BLOCK {
            let mut some = None;
            (b * BLOCK..(b + 1) * BLOCK).for_each(|i| take(&mut some, y, want.log_y, i));
            self.some.push(some);
        }
    }

    /// First, least, greatest, last of a range.
    fn of_range(&self, y: &[f64], log_y: bool, begin: usize, end: usize) -> Option<[usize; 4]> {
        let mut some = None;
        let mut i = begin;
        while i < end {
            match self.some.get(i / BLOCK) {
                Some(block) if i.is_multiple_of(BLOCK) && i + BLOCK <= end => {
                    if let Some(b) = block {
                        b.iter().for_each(|&k| take(&mut some, y, log_y, k));
                    }
                    i += BLOCK;
                }
                _ => {
                    take(&mut some, y, log_y, i);
                    i += 1;
                }
            }
        }
        some
    }
}

/// Whether a value can be drawn.
fn good(y: f64, log_y: bool) -> bool {
    y.is_finite() && (!log_y || y > 0.0)
}

/// Adds the value of an index to first, least, greatest, last.
fn take(some: &mut Option<[usize; 4]>, y: &[f64], log_y: bool, i: usize) {
    if !good(y[i], log_y) {
        return;
    }
    let s = some.get_or_insert([i; 4]);
    s[0] = s[0].min(i);
    if y[i] < y[s[1]] {
        s[1] = i;
    }
    if y[i] > y[s[2]] {
        s[2] = i;
    }
    s[3] = s[3].max(i);
}

/// Appends what can be seen of (x, y), x ascending: every point if there are few, else at most four for each
/// pixel column. What cannot be drawn (not finite; not positive on a logarithmic axis) is left out.
fn decimate(x: &[f64], y: &[f64], want: Want, blocks: &Blocks, out: &mut Vec<PlotPoint>) {
    let n = x.len().min(y.len());
    let (x, y) = (&x[..n], &y[..n]);
    let data = |v: f64| if want.log_x { 10f64.powf(v) } else { v };
    // one point beyond each side, so that lines leave the plot
    let (mut lo, mut hi) = (0, n);
    if let Some((a, b)) = want.range {
        lo = x.partition_point(|&v| v < data(a)).saturating_sub(1);
        hi = (x.partition_point(|&v| v <= data(b)) + 1).min(n);
    }
    if want.log_x {
        lo = lo.max(x.partition_point(|&v| v <= 0.0));
    }
    let mut push = |i: usize| {
        let px = if want.log_x { x[i].log10() } else { x[i] };
        let py = if want.log_y { y[i].log10() } else { y[i] };
        out.push(PlotPoint::new(px, py));
    };
    let width = want.width.max(16);
    if hi.saturating_sub(lo) <= 4 * width {
        (lo..hi).filter(|&i| good(y[i], want.log_y)).for_each(push);
        return;
    }
    let drawn = |v: f64| if want.log_x { v.log10() } else { v };
    let (a, b) = (drawn(x[lo]), drawn(x[hi - 1]));
    let mut begin = lo;
    for c in 0..width {
        let border = data(a + (b - a) * (c + 1) as f64 / width as f64);
        let last = c + 1 == width;
        let end = if last { hi } else { begin + x[begin..hi].partition_point(|&v| v < border) };
        let some = blocks.of_range(y, want.log_y, begin, end);
        if let Some(mut s) = some {
            s.sort_unstable();
            push(s[0]);
            (1..4).filter(|&k| s[k] != s[k - 1]).for_each(|k| push(s[k]));
        }
        begin = end;
    }
}

/// The index whose x is nearest.
pub(crate) fn nearest(x: &[f64], at: f64) -> Option<usize> {
    let i = x.partition_point(|&v| v < at);
    match (i.checked_sub(1), x.get(i)) {
        (Some(b), Some(&v)) if at - x[b] < v - at => Some(b),
        (_, Some(_)) => Some(i),
        (before, None) => before,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn want(width: usize) -> Want {
        Want { generation: 0, columns: 0, smooth: 0.0, log_x: false, log_y: false, range: None, width }
    }

    #[test]
    fn peaks_survive_and_points_do_not_pile_up() {
        let n = 100_000;
        let x: Vec<f64> = (0..n).map(f64::from).collect();
        let mut y: Vec<f64> = x.iter().map(|v| (v / 900.0).sin()).collect();
        (y[777], y[50_001]) = (9.0, -9.0);
        let mut s = Series::default();
        let p = s.points(&x, &y, want(500));
        assert!(p.len() <= 2000 && p.len() > 900, "{}", p.len());
        assert!(p.windows(2).all(|w| w[0].x < w[1].x));
        assert!(p.iter().any(|p| (p.x, p.y) == (777.0, 9.0)));
        assert!(p.iter().any(|p| (p.x, p.y) == (50_001.0, -9.0)));
        assert_eq!((p[0].x, p[p.len() - 1].x), (0.0, 99_999.0));
    }

    #[test]
    fn blocks_change_nothing() {
        let n = 20_000usize;
        let x: Vec<f64> = (0..n).map(|i| i as f64).collect();
        let value = |i: usize| ((i * 7919) % 1009) as f64 - 3.0;
        let y: Vec<f64> = (0..n).map(|i| if i % 97 == 0 { f64::NAN } else { value(i) }).collect();
        for (log_y, range) in [(false, None), (true, None), (false, Some((777.3, 15_003.9)))] {
            let w = Want { log_y, range, ..want(40) };
            let mut with = Series::default();
            with.points(&x[..5000], &y[..5000], w);
            let with = with.points(&x, &y, w).to_vec();
            let mut without = vec![];
            decimate(&x, &y, w, &Blocks::default(), &mut without);
            assert_eq!(with, without);
            assert!(with.len() > 60);
        }
    }

    #[test]
    fn a_zoomed_part_is_exact_and_reaches_over_its_borders() {
        let x: Vec<f64> = (0..1000).map(f64::from).collect();
        let mut s = Series::default();
        let p = s.points(&x, &x, Want { range: Some((10.5, 13.5)), ..want(100) });
        assert_eq!(p.iter().map(|p| p.x).collect::<Vec<_>>(), [10.0, 11.0, 12.0, 13.0, 14.0]);
    }

    #[test]
    fn logarithmic_axes_leave_out_what_has_no_logarithm() {
        let (x, y) = ([0.0, 1.0, 10.0, 100.0], [5.0, 0.0, 10.0, f64::NAN]);
        let mut s = Series::default();
        let p = s.points(&x, &y, Want { log_x: true, log_y: true, ..want(100) });
        assert_eq!(p.iter().map(|p| (p.x, p.y)).collect::<Vec<_>>(), [(1.0, 1.0)]);
        let many: Vec<f64> = (0..5000).map(|v| f64::from(v) - 10.0).collect();
        let p = s.points(&many, &many, Want { log_x: true, log_y: true, ..want(50) });
        assert!(p.iter().all(|p| p.x.is_finite() && p.y.is_finite()) && p.len() > 50);
    }

    #[test]
    fn smoothing_starts_unbiased_and_goes_on_where_it_stopped() {
        let y: Vec<f64> = (0..50).map(|i| f64::from(i % 7)).collect();
        let w = Want { smooth: 0.9, ..want(100) };
        let x: Vec<f64> = (0..50).map(f64::from).collect();
        let mut whole = Series::default();
        let all: Vec<f64> = whole.points(&x, &y, w).iter().map(|p| p.y).collect();
        assert!((all[1] - (0.9 * 0.0 + 1.0) / 1.9).abs() < 1e-12);
        let mut parts = Series::default();
        parts.points(&x[..20], &y[..20], w);
        let grown: Vec<f64> = parts.points(&x, &y, w).iter().map(|p| p.y).collect();
        assert_eq!(all, grown);
    }

    #[test]
    fn the_nearest_of_a_few() {
        let x = [1.0, 2.0, 4.0];
        let at = [0.0, 1.4, 1.6, 3.1, 9.0].map(|v| nearest(&x, v));
        assert_eq!(at, [Some(0), Some(0), Some(1), Some(2), Some(2)]);
        assert_eq!(nearest(&[], 1.0), None);
    }
}
