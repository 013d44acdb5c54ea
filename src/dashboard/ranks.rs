//! What the ranks of runs did, in the steps before the newest record: a table.

use egui::{Align, Layout, RichText, ScrollArea, Ui, vec2};

use super::app::Cx;
use super::card::Card;
use super::export::Table;
use super::run::RunData;
use super::text;
use super::theme::Palette;
use crate::train::tally::RankRecord;

/// The runs on several ranks, with their newest records.
fn records<'a>(cx: &Cx<'a>) -> Vec<(usize, &'a RunData, &'a RankRecord)> {
    cx.visible().filter_map(|(i, r)| Some((i, r, r.ranks.last.as_ref()?))).collect()
}

/// Whether a visible run is one of several ranks.
pub(crate) fn any(cx: &Cx<'_>) -> bool {
    !records(cx).is_empty()
}

/// A line a rank: time communicating, how much of it is hidden, bytes sent, values of tables.
pub(crate) fn table(ui: &mut Ui, cx: &Cx<'_>) {
    let p = Palette::of(ui);
    let records = records(cx);
    let csv = || {
        let mut t = Table::new([
            "run",
            "step",
            "steps",
            "rank",
            "communicating_s",
            "waiting_s",
            "overlap",
            "sent_bytes",
            "received_bytes",
            "table_values",
        ]);
        for (_, run, record) in &records {
            for (rank, l) in record.ranks.iter().enumerate() {
                t.row([
                    run.name.as_str().into(),
                    (record.step as f64).into(),
                    (record.steps as f64).into(),
                    rank.into(),
                    l.communicating.into(),
                    l.waiting.into(),
                    l.overlap.into(),
                    (l.sent as f64).into(),
                    (l.received as f64).into(),
                    (l.table_values as f64).into(),
                ]);
            }
        }
        t
    };
    let card = Card {
        title: "Ranks",
        hint: "a step, newest",
        file: "overview-ranks".into(),
        keys: vec![],
        legend: vec![],
    };
    card.show(ui, cx.exports, csv, |ui| {
        ScrollArea::both().auto_shrink(false).id_salt("ranks").show(ui, |ui| {
            let grid = egui::Grid::new("ranks")
                .num_columns(5)
                .min_col_width(20.0)
                .striped(true)
                .spacing(vec2(10.0, 4.0));
            grid.show(ui, |ui| {
                for (title, tip) in [
                    ("rank", "its number"),
                    ("comm.", "seconds of a step in which sums and exchanges ran"),
                    ("hidden", "the share of them in which the rank computed, too"),
                    ("sent", "bytes in a step"),
                    ("tables", "values of embedding tables that it holds"),
                ] {
                    ui.label(RichText::new(title).small().color(p.weak)).on_hover_text(tip);
                }
                ui.end_row();
                for (i, run, record) in &records {
                    let steps = record.steps.max(1) as f64;
                    for (rank, l) in record.ranks.iter().enumerate() {
                        ui.horizontal(|ui| {
                            let (rect, r) = ui.allocate_exact_size(vec2(10.0, 10.0), egui::Sense::hover());
                            ui.painter().rect_filled(rect, 2.0, p.run(*i));
                            r.on_hover_text(format!("{}, step {}", run.name, text::group(record.step)));
                            ui.label(rank.to_string());
                        });
                        for cell in [
                            text::micros(1e6 * l.communicating / steps),
                            format!("{:.0} %", 100.0 * l.overlap),
                            text::bytes(l.sent as f64 / steps),
                            text::short(l.table_values as f64),
                        ] {
                            ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
                                ui.label(RichText::new(cell).monospace().size(11.0));
                            });
                        }
                        ui.end_row();
                    }
                }
            });
        });
    });
}
