//! Metrics as a person reads them: the same for `train` and `eval`.

use super::output;
use crate::data::metrics::{Decile, GroupedAuc, Metrics};
use crate::text::group;

/// Prints the figures of an evaluated set, a line each, then calibration by decile.
pub fn print(m: &Metrics, grouped: Option<&GroupedAuc>, deciles: &[Decile]) -> anyhow::Result<()> {
    let show = |v: Option<f64>| v.map_or("undefined (one class)".into(), |v| format!("{v:.6}"));
    let line = |k: &str, v: String| output::line(&format!("{k:<20} {v}"));
    line("rows", m.rows.to_string())?;
    line("positives", m.positives.to_string())?;
    line("normalized entropy", show(m.ne))?;
    line("log loss", format!("{:.6}", m.logloss))?;
    line("AUC", show(m.auc))?;
    if let Some(g) = grouped {
        let auc = g.auc.map_or("undefined".into(), |v| format!("{v:.6}"));
        let groups = format!(
            "over {} groups of both classes, {} of one class left out",
            group(g.groups),
            group(g.groups_left_out)
        );
        line("grouped AUC", format!("{auc}  ({groups})"))?;
    }
    line("calibration", m.calibration.map_or("undefined (no positive)".into(), |v| format!("{v:.6}")))?;
    if !deciles.is_empty() {
        output::line("by decile of the score:    rows  predicted   observed")?;
    }
    for d in deciles {
        output::line(&format!(
            "{:>20} {:>10} {:>10.6} {:>10.6}",
            d.decile,
            group(d.rows),
            d.predicted,
            d.observed
        ))?;
    }
    Ok(())
}
