//! Streams.

use super::app::Cx;
use egui::Ui;

#[derive(Default)]
pub(crate) struct Streams;

impl Streams {
    pub fn ui(&mut self, ui: &mut Ui, cx: &mut Cx<'_>) {
        super::steps::bar(ui, cx);
    }
}
