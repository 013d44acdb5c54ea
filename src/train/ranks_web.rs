//! A browser tab has no other ranks: nothing here can be made, and the compiler leaves out what would be done with it.

use super::checkpoint::{CheckpointError, CheckpointMeta};
use super::save::StateTensors;
use super::sharded::{Checkpoint, Shard};
use super::store::Store;
use super::tally::Told;
use crate::data::batch::{Batch, SparseIds};
use crate::data::loader::LoaderOptions;
use crate::data::metrics::MetricsAccumulator;
use crate::graph::exec::{Program, State};
use crate::graph::{Graph, Slot, StateId, Tensor};
use crate::model::params::Param;
use crate::ops::embedding::SparseInputs;

pub use super::tally::{RankLine, RankReport};

/// None.
#[derive(Clone, Debug)]
pub enum Ranks {}

/// None.
#[derive(Clone, Debug)]
pub enum Exchange {}

/// None.
#[derive(Debug)]
pub enum Asking {}

/// None.
#[derive(Clone, Debug)]
pub enum Piece {}

#[allow(missing_docs)]
impl Piece {
    pub fn state_id(&self, _: &StateId) -> StateId {
        match *self {}
    }
    pub fn rows(&self) -> usize {
        match *self {}
    }
    pub fn width(&self) -> usize {
        match *self {}
    }
    pub fn table(&self) -> usize {
        match *self {}
    }
}

#[allow(missing_docs)]
impl Exchange {
    pub fn occurrences(&self, _: &mut Graph, _: usize) -> Option<Tensor> {
        match *self {}
    }
    pub fn own(&self) -> &[Piece] {
        match *self {}
    }
    pub fn pull(&self, _: &mut Graph, _: &[StateId]) -> Vec<Tensor> {
        match *self {}
    }
    pub fn push(
        &self,
        _: &mut Graph,
        _: &[StateId],
        _: &[Tensor],
    ) -> (Vec<(Tensor, Tensor, SparseInputs)>, Tensor) {
        match *self {}
    }
}

#[allow(missing_docs)]
impl Ranks {
    pub fn rank(&self) -> usize {
        match *self {}
    }
    pub fn world(&self) -> usize {
        match *self {}
    }
    pub fn own(&self) -> &[Piece] {
        match *self {}
    }
    pub(super) fn exchange(&self, _: Vec<usize>, _: bool, _: &str) -> Exchange {
        match *self {}
    }
    pub(super) fn sum_of_tables(&self, _: &mut Graph, _: Tensor) -> Tensor {
        match *self {}
    }
    pub(super) fn sum_of_losses(&self, _: &mut Graph, _: &[Tensor]) -> Vec<Tensor> {
        match *self {}
    }
    pub(super) fn sum_of_gradients(&self, _: &mut Graph, _: &[Tensor]) -> Vec<Tensor> {
        match *self {}
    }
    pub(super) fn forward(
        &self,
        _: &Graph,
        _: &[Param],
        _: Vec<usize>,
        _: &str,
    ) -> (Graph, Vec<Tensor>, Exchange) {
        match *self {}
    }
    pub(super) fn share(&self, _: LoaderOptions) -> LoaderOptions {
        match *self {}
    }
    pub(super) fn ask(&self, _: &Exchange, _: &[SparseIds], _: bool) -> Asking {
        match *self {}
    }
    pub(super) fn wish(&self, _: Told) {
        match *self {}
    }
    pub(super) fn told(&self) -> Told {
        match *self {}
    }
    pub(super) fn upload(
        &self,
        _: &mut Program,
        _: &Exchange,
        _: &[&Batch],
        _: (&[SparseIds], Asking),
        _: bool,
    ) -> anyhow::Result<()> {
        match *self {}
    }
    pub(super) fn merge(&self, _: &MetricsAccumulator) -> anyhow::Result<MetricsAccumulator> {
        match *self {}
    }
    pub(super) fn begin_tables(
        &self,
        _: &mut State,
        _: &[Param],
        _: u64,
        _: impl Fn(&Param) -> &'static [Slot],
    ) -> anyhow::Result<()> {
        match *self {}
    }
    pub(super) fn who_sees(&self, _: &mut dyn Store) -> anyhow::Result<Vec<bool>> {
        match *self {}
    }
    pub(super) async fn keep_parts(
        &self,
        _: &mut dyn Store,
        _: &[bool],
        _: (&State, &[Param], &[StateTensors]),
        _: &CheckpointMeta,
        _: impl Fn(&StateId, &[f32]) -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<Shard>> {
        match *self {}
    }
    pub(super) async fn save_whole(
        &self,
        _: &mut dyn Store,
        _: (&State, &[Param], &[StateTensors]),
        _: &CheckpointMeta,
    ) -> anyhow::Result<()> {
        match *self {}
    }
    pub(super) fn take_up(
        &self,
        _: Option<Checkpoint>,
        _: (&mut State, &[Param], &[StateTensors]),
    ) -> anyhow::Result<Option<CheckpointError>> {
        match *self {}
    }
    pub(super) fn tell(&self, _: Option<String>) -> anyhow::Result<String> {
        match *self {}
    }
    pub(super) fn figures(&self) -> RankLine {
        match *self {}
    }
    pub(super) fn gather(&self, _: &RankLine) -> anyhow::Result<Vec<RankLine>> {
        match *self {}
    }
    pub(super) fn report(&self) -> anyhow::Result<RankReport> {
        match *self {}
    }
    pub fn largest(&self, _: u64) -> anyhow::Result<u64> {
        match *self {}
    }
    pub fn agree_or(&self, _: u64, _: impl FnOnce(usize) -> String) -> anyhow::Result<()> {
        match *self {}
    }
    pub fn agree(&self, _: &str, _: u64) -> anyhow::Result<()> {
        match *self {}
    }
}
