//! model.

use super::app::Cx;
use egui::Ui;

pub(crate) fn ui(ui: &mut Ui, cx: &mut Cx<'_>) {
    super::steps::bar(ui, cx);
}
