//! The step that is looked at: a slider over all that was measured, and a play button.

use std::collections::BTreeSet;

use egui::{RichText, Slider, Ui};

use super::app::{Cx, State};
use super::run::RunData;
use super::text;
use super::theme::Palette;

/// Seconds that a whole run plays, and the least and most of one step.
const PLAY: (f64, f64, f64) = (12.0, 0.05, 0.6);

/// Every step at which one of the runs was diagnosed, ascending.
pub(crate) fn all<'a>(runs: impl Iterator<Item = &'a RunData>) -> Vec<u64> {
    let mut steps = BTreeSet::new();
    for r in runs {
        steps.extend(r.diagnoses.iter().map(|d| d.step));
        steps.extend(r.snapshots.iter().map(|s| s.step));
    }
    steps.into_iter().collect()
}

/// Where the chosen step stands among all.
fn index(state: &State, steps: &[u64]) -> usize {
    let last = steps.len().saturating_sub(1);
    state.step.map_or(last, |s| steps.partition_point(|&x| x <= s).saturating_sub(1))
}

/// Moves by so many steps; at the end the newest is followed.
pub(crate) fn shift(state: &mut State, steps: &[u64], by: i64) {
    let to = (index(state, steps) as i64 + by).max(0) as usize;
    state.step = if to + 1 >= steps.len() { None } else { Some(steps[to]) };
}

/// Draws play button and slider; while playing, moves on when it is time.
pub(crate) fn bar(ui: &mut Ui, cx: &mut Cx<'_>) {
    let p = Palette::of(ui);
    let steps = all(cx.visible().map(|(_, r)| r));
    let s = &mut *cx.state;
    if steps.len() < 2 {
        s.playing = false;
        if let Some(one) = steps.first() {
            ui.label(format!("step {}", text::group(*one)));
        }
        return;
    }
    let now = ui.input(|i| i.time);
    if s.playing {
        let each = (PLAY.0 / steps.len() as f64).clamp(PLAY.1, PLAY.2);
        if s.step.is_none() && s.played < 0.0 {
            s.playing = false; // the end was shown
        } else if now - s.played >= each {
            if s.step.is_none() {
                s.step = Some(steps[0]);
            } else {
                shift(s, &steps, 1);
            }
            s.played = if s.step.is_none() { -1.0 } else { now };
        }
        ui.ctx().request_repaint_after(std::time::Duration::from_secs_f64(each));
    } else {
        s.played = 0.0;
    }
    let (icon, tip) = if s.playing { ("Stop", "Stop (space)") } else { ("Play", "Play the run (space)") };
    if ui.button(icon).on_hover_text(tip).clicked() {
        s.playing = !s.playing;
    }
    let mut at = index(s, &steps);
    let last = steps.len() - 1;
    ui.label(format!("step {}", text::group(steps[at])));
    ui.label(RichText::new(if s.step.is_none() { "newest" } else { "earlier" }).small().color(p.weak));
    ui.spacing_mut().slider_width = (ui.available_width() - 20.0).clamp(90.0, 260.0);
    let slider = Slider::new(&mut at, 0..=last).show_value(false);
    let r = ui.add(slider).on_hover_text("Step (left and right)");
    r.widget_info(|| egui::WidgetInfo::slider(true, at as f64, "Step"));
    if r.changed() {
        s.step = if at == last { None } else { Some(steps[at]) };
        s.playing = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_stops_at_the_first_and_follows_at_the_last() {
        let steps = [10, 20, 40];
        let mut s = State::default();
        shift(&mut s, &steps, -1);
        assert_eq!(s.step, Some(20));
        shift(&mut s, &steps, -5);
        assert_eq!(s.step, Some(10));
        shift(&mut s, &steps, 2);
        assert_eq!(s.step, None);
        s.step = Some(39);
        assert_eq!(index(&s, &steps), 1);
        shift(&mut s, &[], 1);
        assert_eq!(s.step, None);
    }
}
