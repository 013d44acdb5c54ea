//! Long columns made short: smoothing, and for each pixel column of a plot the least and the greatest
//! value. What was made is kept until the data, the zoom or the smoothing change.

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
    pyramid: Pyramid,
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
            self.pyramid.extend(y, want);
            decimate(x, y, want, &self.pyramid, &mut self.points);
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

/// Values in the smallest bucket.
const BUCKET: usize = 8;

/// No value of a bucket can be drawn.
const NONE: u32 = u32::MAX;

/// The indices of the least and the greatest value of each bucket of 8, 16, 32, … values, so that a zoom over
/// a long column looks at few of them.
#[derive(Debug, Default)]
struct Pyramid {
    of: Option<(u64, u8, f64, bool)>,
    levels: Vec<Vec<(u32, u32)>>,
}

impl Pyramid {
    fn extend(&mut self, y: &[f64], want: Want) {
        let of = Some((want.generation, want.columns, want.smooth, want.log_y));
        let whole = self.levels.first().map_or(0, Vec::len);
        if self.of != of || whole > y.len() / BUCKET {
            *self = Pyramid { of, ..Pyramid::default() };
        }
        if y.len() < BUCKET {
            return;
        }
        if self.levels.is_empty() {
            self.levels.push(vec![]);
        }
        for b in self.levels[0].len()..y.len() / BUCKET {
            let mut some = (NONE, NONE);
            (b * BUCKET..(b + 1) * BUCKET).for_each(|i| take(&mut some, y, want.log_y, i as u32));
            self.levels[0].push(some);
        }
        for j in 1.. {
            let (below, above) = (self.levels[j - 1].len() / 2, self.levels.get(j).map_or(0, Vec::len));
            if below == 0 {
                break;
            }
            if above == 0 {
                self.levels.truncate(j);
                self.levels.push(vec![]);
            }
            for b in above..below {
                let mut some = self.levels[j - 1][2 * b];
                merge(&mut some, self.levels[j - 1][2 * b + 1], y);
                self.levels[j].push(some);
            }
        }
    }

    /// Least and greatest of a range.
    fn of_range(&self, y: &[f64], log_y: bool, begin: usize, end: usize) -> (u32, u32) {
        let mut some = (NONE, NONE);
        let mut i = begin;
        while i < end {
            let fits = |j: &usize| {
                let size = BUCKET << j;
                i.is_multiple_of(size) && i + size <= end && i / size < self.levels[*j].len()
            };
            match (0..self.levels.len()).take_while(fits).last() {
                Some(j) => {
                    merge(&mut some, self.levels[j][i / (BUCKET << j)], y);
                    i += BUCKET << j;
                }
                None => {
                    take(&mut some, y, log_y, i as u32);
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

/// Adds the value of an index to least and greatest.
fn take(some: &mut (u32, u32), y: &[f64], log_y: bool, i: u32) {
    if good(y[i as usize], log_y) {
        merge(some, (i, i), y);
    }
}

fn merge(some: &mut (u32, u32), more: (u32, u32), y: &[f64]) {
    if more.0 == NONE {
        return;
    }
    if some.0 == NONE {
        *some = more;
        return;
    }
    if y[more.0 as usize] < y[some.0 as usize] {
        some.0 = more.0;
    }
    if y[more.1 as usize] > y[some.1 as usize] {
        some.1 = more.1;
    }
}

/// Appends what can be seen of (x, y), x ascending: every point if there are few, else two for each pixel
/// column. What cannot be drawn (not finite; not positive on a logarithmic axis) is left out.
fn decimate(x: &[f64], y: &[f64], want: Want, pyramid: &Pyramid, out: &mut Vec<PlotPoint>) {
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
    let mut pushed = usize::MAX;
    let mut push = |i: usize| {
        if i == pushed || !good(y[i], want.log_y) {
            return;
        }
        pushed = i;
        let px = if want.log_x { x[i].log10() } else { x[i] };
        let py = if want.log_y { y[i].log10() } else { y[i] };
        out.push(PlotPoint::new(px, py));
    };
    let width = want.width.max(16);
    if hi.saturating_sub(lo) <= 4 * width {
        (lo..hi).for_each(push);
        return;
    }
    let drawn = |v: f64| if want.log_x { v.log10() } else { v };
    let (a, b) = (drawn(x[lo]), drawn(x[hi - 1]));
    push(lo);
    let (mut begin, mut width_before) = (lo, 1);
    for c in 0..width {
        let mut end = hi;
        if c + 1 < width {
            let border = data(a + (b - a) * (c + 1) as f64 / width as f64);
            end = first_not_below(&x[..hi], begin, border, width_before);
            width_before = end - begin;
            // half a column more or less does not show, and whole buckets are quick
            let half = (end - begin) / 2;
            if half >= BUCKET {
                end -= end % (1 << half.ilog2());
            }
        }
        let (least, most) = pyramid.of_range(y, want.log_y, begin, end);
        if least != NONE {
            push(least.min(most) as usize);
            if least != most {
                push(least.max(most) as usize);
            }
        }
        begin = end;
    }
    push(hi - 1);
}

/// The first index from `begin` on whose value is not below `border`; `guess` says how far off it may be.
fn first_not_below(x: &[f64], begin: usize, border: f64, guess: usize) -> usize {
    let (mut lo, mut step) = (begin, guess.max(1));
    while lo + step < x.len() && x[lo + step] < border {
        lo += step;
        step *= 2;
    }
    let hi = (lo + step + 1).min(x.len());
    lo + x[lo..hi].partition_point(|&v| v < border)
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
        assert!(p.len() <= 1002 && p.len() > 900, "{}", p.len());
        assert!(p.windows(2).all(|w| w[0].x < w[1].x));
        assert!(p.iter().any(|p| (p.x, p.y) == (777.0, 9.0)));
        assert!(p.iter().any(|p| (p.x, p.y) == (50_001.0, -9.0)));
        assert_eq!((p[0].x, p[p.len() - 1].x), (0.0, 99_999.0));
    }

    #[test]
    fn the_pyramid_changes_nothing() {
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
            decimate(&x, &y, w, &Pyramid::default(), &mut without);
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
