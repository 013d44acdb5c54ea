//! The gain figure: the mHC paper's Figures 3 and 7 (gain curves along depth) above its Figure 8 (residual
//! matrices and composites, annotated with their row and column sums).

use super::gains::Gains;
use crate::diagnose::{Matrix, Snapshot};
use anyhow::{Context, anyhow, bail};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;
use std::sync::OnceLock;

/// The format of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Vector graphics.
    Svg,
    /// Pixels.
    Png,
}

impl Kind {
    /// By a file name's ending.
    pub fn of(file: &Path) -> anyhow::Result<Self> {
        match file.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase).as_deref() {
            Some("svg") => Ok(Kind::Svg),
            Some("png") => Ok(Kind::Png),
            _ => bail!("{}: a figure is a .svg or a .png; name one of these", file.display()),
        }
    }
}

const WIDTH: u32 = 1180;
const CURVES: u32 = 400;
const MATRICES: u32 = 250;
const TITLE: u32 = 44;
const FORWARD: RGBColor = RGBColor(0, 114, 178);
const BACKWARD: RGBColor = RGBColor(213, 94, 0);
const INK: RGBColor = RGBColor(40, 44, 52);
const FONT: &str = "sans-serif";

type Area<'a, B> = DrawingArea<B, Shift>;

/// Draws the figure; its file's bytes.
pub fn draw(g: &Gains, kind: Kind) -> anyhow::Result<Vec<u8>> {
    static FONTS: OnceLock<bool> = OnceLock::new();
    let ok = FONTS.get_or_init(|| {
        plotters::style::register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT).is_ok()
    });
    if !ok {
        bail!("the built-in font cannot be read");
    }
    let rows = if g.snapshot.is_some() { 2 } else { 0 };
    let size = (WIDTH, TITLE + CURVES + rows * MATRICES + 8);
    match kind {
        Kind::Svg => {
            let mut text = String::new();
            page(g, SVGBackend::with_string(&mut text, size).into_drawing_area())?;
            Ok(text.into_bytes())
        }
        Kind::Png => {
            let mut rgb = vec![255u8; (size.0 * size.1 * 3) as usize];
            page(g, BitMapBackend::with_buffer(&mut rgb, size).into_drawing_area())?;
            let mut bytes = std::io::Cursor::new(vec![]);
            image::write_buffer_with_format(
                &mut bytes,
                &rgb,
                size.0,
                size.1,
                image::ExtendedColorType::Rgb8,
                image::ImageFormat::Png,
            )
            .context("encoding the PNG")?;
            Ok(bytes.into_inner())
        }
    }
}

fn failed<E: std::fmt::Display>(e: E) -> anyhow::Error {
    anyhow!("cannot draw the figure: {e}")
}

fn page<B: DrawingBackend>(g: &Gains, area: Area<'_, B>) -> anyhow::Result<()>
where
    B::ErrorType: 'static,
{
    area.fill(&WHITE).map_err(failed)?;
    let (head, rest) = area.split_vertically(TITLE);
    let (curves, matrices) = rest.split_vertically(CURVES);
    let what = g.snapshot.as_ref().map_or(String::new(), |s| format!(" · {}, {} streams", s.mode, s.streams));
    let title = format!("{}{what} · step {}", g.run, g.record.step);
    head.draw(&Text::new(title, (16, 14), (FONT, 20).into_font().color(&INK))).map_err(failed)?;
    let (left, right) = curves.split_horizontally(WIDTH / 2);
    let r = &g.record;
    let single = |f: fn(&crate::diagnose::LayerStats) -> f64| r.layers.iter().map(f).collect::<Vec<_>>();
    chart(&left, "gain of each layer", "layer l", &single(|l| l.forward_gain), &single(|l| l.backward_gain))?;
    chart(
        &right,
        "composite gain: forward of layers 0…l, backward of l…last",
        "layer l",
        &r.composite_forward,
        &r.composite_backward,
    )?;
    if let Some(s) = &g.snapshot {
        let (single, composite) = matrices.split_vertically(MATRICES);
        let last = s.layers.len().saturating_sub(1);
        // up to four layers, evenly spaced
        let mut layers: Vec<usize> = (0..4).map(|i| (i * last) / 3).collect();
        layers.dedup();
        let scale = scale(s);
        strip(&single, &layers, scale, |l| (format!("res of layer {l}"), s.res(l)))?;
        strip(&composite, &layers, scale, |l| {
            // of the segment that ends here
            let from = (0..=l).find(|&a| s.composite(a, l).is_some()).unwrap_or(l);
            (format!("composite of layers {from}…{l}"), s.composite(from, l))
        })?;
    }
    area.present().map_err(failed)
}

/// Two curves over depth on a logarithmic axis, with the band [1/3, 3].
fn chart<B: DrawingBackend>(
    area: &Area<'_, B>,
    title: &str,
    x: &str,
    forward: &[f64],
    backward: &[f64],
) -> anyhow::Result<()>
where
    B::ErrorType: 'static,
{
    let positive = forward.iter().chain(backward).copied().filter(|v| *v > 0.0 && v.is_finite());
    let (low, high) = positive.fold((1.0f64 / 3.0, 3.0f64), |(a, b), v| (a.min(v), b.max(v)));
    let (low, high) = (low / 1.3, high * 1.3);
    let last = forward.len().saturating_sub(1).max(1) as f64;
    let mut c = ChartBuilder::on(area)
        .caption(title, (FONT, 16).into_font().color(&INK))
        .margin(14)
        .x_label_area_size(38)
        .y_label_area_size(58)
        .build_cartesian_2d(-0.15..last + 0.15, (low..high).log_scale())
        .map_err(failed)?;
    c.draw_series(std::iter::once(Rectangle::new(
        [(-0.15, 1.0 / 3.0), (last + 0.15, 3.0)],
        RGBColor(0, 158, 115).mix(0.08).filled(),
    )))
    .map_err(failed)?;
    c.configure_mesh()
        .light_line_style(WHITE.mix(0.0))
        .bold_line_style(INK.mix(0.12))
        .axis_style(INK.mix(0.6))
        .x_labels(forward.len().min(12))
        .x_label_formatter(&|v| if (v - v.round()).abs() < 1e-6 { format!("{v:.0}") } else { String::new() })
        .y_label_formatter(&|v| short(*v))
        .x_desc(x)
        .y_desc("gain (log scale)")
        .label_style((FONT, 13).into_font().color(&INK))
        .draw()
        .map_err(failed)?;
    for (name, colour, values) in [("forward", FORWARD, forward), ("backward", BACKWARD, backward)] {
        let points: Vec<(f64, f64)> =
            values.iter().enumerate().map(|(l, v)| (l as f64, v.max(low))).collect();
        c.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))
            .map_err(failed)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(3)));
        c.draw_series(points.iter().map(|p| Circle::new(*p, 3, colour.filled()))).map_err(failed)?;
    }
    c.configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(INK.mix(0.2))
        .label_font((FONT, 13).into_font().color(&INK))
        .draw()
        .map_err(failed)
}

fn short(v: f64) -> String {
    if !(0.01..1000.0).contains(&v) {
        format!("{v:.0e}")
    } else if v >= 10.0 {
        format!("{v:.0}")
    } else {
        format!("{v:.2}")
    }
}

/// The greatest absolute element, at least 1: white is 0, full colour is this.
fn scale(s: &Snapshot) -> f64 {
    let all = s.layers.iter().flat_map(|l| &l.res).chain(&s.composites);
    all.filter(|x| x.is_finite()).fold(1.0, |m, x| m.max(f64::from(x.abs())))
}

/// Matrices side by side.
fn strip<B: DrawingBackend>(
    area: &Area<'_, B>,
    layers: &[usize],
    scale: f64,
    of: impl Fn(usize) -> (String, Option<Matrix>),
) -> anyhow::Result<()>
where
    B::ErrorType: 'static,
{
    for (i, &l) in layers.iter().enumerate() {
        let (title, m) = of(l);
        if let Some(m) = m {
            heat_map(area, 16 + i as i32 * (WIDTH as i32 / 4), &title, &m, scale)?;
        }
    }
    Ok(())
}

fn heat_map<B: DrawingBackend>(
    area: &Area<'_, B>,
    x0: i32,
    title: &str,
    m: &Matrix,
    scale: f64,
) -> anyhow::Result<()>
where
    B::ErrorType: 'static,
{
    let n = m.n();
    let cell = 160 / n.max(1) as i32;
    let y0 = 34;
    let text = |t: String, at: (i32, i32), size: i32, colour: RGBColor, h: HPos| {
        let style = (FONT, size).into_font().color(&colour).pos(Pos::new(h, VPos::Center));
        area.draw(&Text::new(t, at, style)).map_err(failed)
    };
    text(title.into(), (x0, 16), 15, INK, HPos::Left)?;
    let number = (cell / 3).clamp(8, 14);
    for o in 0..n {
        for i in 0..n {
            let v = m.at(o, i);
            let (x, y) = (x0 + i as i32 * cell, y0 + o as i32 * cell);
            area.draw(&Rectangle::new([(x, y), (x + cell - 1, y + cell - 1)], colour(v / scale).filled()))
                .map_err(failed)?;
            let ink = if (v / scale).abs() > 0.55 { WHITE } else { INK };
            text(format!("{v:.2}"), (x + cell / 2, y + cell / 2), number, ink, HPos::Center)?;
        }
    }
    let (right, below) = (x0 + n as i32 * cell + 6, y0 + n as i32 * cell + 10);
    for (k, s) in m.row_sums().iter().enumerate() {
        text(format!("{s:.3}"), (right, y0 + k as i32 * cell + cell / 2), number, FORWARD, HPos::Left)?;
    }
    for (k, s) in m.col_sums().iter().enumerate() {
        text(format!("{s:.3}"), (x0 + k as i32 * cell + cell / 2, below), number, BACKWARD, HPos::Center)?;
    }
    text("row sums".into(), (right, y0 - 8), 11, FORWARD, HPos::Left)?;
    text("column sums".into(), (x0, below + 16), 11, BACKWARD, HPos::Left)
}

/// Blue for positive, orange for negative, white for 0; the same in both modes, so that pictures compare.
fn colour(t: f64) -> RGBColor {
    let end = if t >= 0.0 { FORWARD } else { BACKWARD };
    let t = if t.is_finite() { t.abs().min(1.0) } else { 0.0 };
    let mix = |c: u8| (255.0 + (f64::from(c) - 255.0) * t).round() as u8;
    RGBColor(mix(end.0), mix(end.1), mix(end.2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::{LayerSnapshot, LayerStats, Record};

    fn sample() -> Gains {
        let layer = |g: f64| LayerStats { forward_gain: g, backward_gain: 1.0 / g, ..LayerStats::default() };
        let res = vec![1.1, -0.2, 0.3, 0.7];
        let snapshot = Snapshot {
            step: 40,
            mode: "hc".into(),
            streams: 2,
            layers: vec![LayerSnapshot { res: res.clone(), ..LayerSnapshot::default() }; 2],
            composites: [res.clone(), res.clone(), res].concat(),
            ..Snapshot::default()
        };
        let record = Record {
            step: 40,
            layers: vec![layer(0.9), layer(1.4)],
            composite_forward: vec![0.9, 2000.0],
            composite_backward: vec![0.0, 0.7],
            ..Record::default()
        };
        Gains { run: "a".into(), record, snapshot: Some(snapshot), course: vec![] }
    }

    #[test]
    fn figures_are_drawn_in_both_formats() {
        let g = sample();
        let svg = String::from_utf8(draw(&g, Kind::Svg).unwrap()).unwrap();
        for word in ["composite of layers 0…1", "res of layer 1", "0.900", "1.400", "backward", "-0.20"] {
            assert!(svg.contains(word), "{word}");
        }
        let png = draw(&g, Kind::Png).unwrap();
        assert!(png.starts_with(b"\x89PNG"));
        let none = Gains { snapshot: None, ..g };
        assert!(draw(&none, Kind::Svg).unwrap().len() > 1000);
        assert!(Kind::of(Path::new("a.pdf")).is_err());
    }
}
