//! The CPU's work for a frame with much data.
//!
//! `cargo test --release --features dashboard --test dashboard speed -- --nocapture` prints it.

use std::time::Instant;

use birkhoff::dashboard::{Dashboard, SharedRun, View};
use egui::{Event as Input, Modifiers, RawInput, Rect, pos2, vec2};

use super::recorded::{Recorded, TOTAL};

const RUNS: u64 = 10;
const POINTS: u64 = 100_000;

fn loaded() -> Dashboard {
    let mut d = Dashboard::new();
    for k in 0..RUNS {
        let run = SharedRun::new();
        let r = Recorded { mode: ["shortcut", "hc", "mhc"][k as usize % 3], seed: k, done: TOTAL };
        for step in 1..=POINTS {
            run.event(&r.step(step));
            if step % 1000 == 0 {
                run.event(&r.eval(step));
            }
        }
        d.add(Box::new(run.source(format!("run {k}"))));
    }
    d.poll();
    assert_eq!(d.run(9).expect("run").steps.len() as u64, POINTS);
    d
}

/// Milliseconds that this thread has had a processor: other programs' share of the machine does not count.
/// Where the system does not say, milliseconds of the clock.
fn busy(begin: Instant) -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanos = stat.and_then(|s| s.split(' ').next()?.parse::<f64>().ok());
    nanos.map_or_else(|| begin.elapsed().as_secs_f64() * 1e3, |n| n / 1e6)
}

/// Milliseconds of each frame: layout, drawing and tessellation.
fn frames(d: &mut Dashboard, n: usize, mut input: impl FnMut(usize) -> Vec<Input>) -> Vec<f64> {
    let ctx = egui::Context::default();
    let size = vec2(1600.0, 1000.0);
    let (mut times, start) = (vec![], Instant::now());
    for k in 0..n + 3 {
        let events = if k < 3 { vec![] } else { input(k - 3) };
        let raw = RawInput {
            screen_rect: Some(Rect::from_min_size(pos2(0.0, 0.0), size)),
            time: Some(k as f64 / 60.0),
            events,
            ..RawInput::default()
        };
        let before = busy(start);
        let out = ctx.run_ui(raw, |ui| d.ui(ui));
        let shapes = ctx.tessellate(out.shapes, out.pixels_per_point);
        let spent = busy(start) - before;
        assert!(shapes.len() > 1);
        if k >= 3 {
            times.push(spent);
        }
    }
    times.sort_by(f64::total_cmp);
    times
}

#[test]
fn ten_runs_of_100_000_points_at_60_frames_a_second() {
    let mut d = loaded();
    d.show(View::Overview);
    let at = pos2(600.0, 400.0);
    let still = frames(&mut d, 60, |_| vec![]);
    let hover = frames(&mut d, 60, |k| vec![Input::PointerMoved(at + vec2(k as f32, 0.0))]);
    let zoom = frames(&mut d, 60, |k| {
        let modifiers = Modifiers::COMMAND;
        vec![
            Input::PointerMoved(at),
            Input::ModifiersChanged(modifiers),
            Input::Zoom(if k < 45 { 1.05 } else { 0.93 }),
        ]
    });
    for (what, t) in [("still", &still), ("hovering", &hover), ("zooming", &zoom)] {
        let (median, p95, most) = (t[t.len() / 2], t[t.len() * 95 / 100], t[t.len() - 1]);
        println!(
            "{RUNS} runs of {POINTS} points, {what}: {median:.2} ms a frame (95 %: {p95:.2}, most {most:.2})"
        );
        // of 16.7; the median, since caches and clocks are shared
        assert!(median < 16.0, "{what}: {median:.2} ms");
    }
}
