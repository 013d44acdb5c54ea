//! The graph: an append-only list of operations over tensors of static shape.
//!
//! The model builds the forward graph, [`Graph::gradients`] appends the backward graph to the same list
//! using nothing but other operations, and the optimiser appends the update: a whole training step is one
//! list, and fusion, memory plan, cost report and picture are passes over it.

mod autodiff;
pub mod cpu;
pub mod dot;
mod dtype;
pub mod exec;
pub mod fuse;
pub mod gpu;
mod ids;
pub mod plan;
mod shape;
#[doc(hidden)]
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;
#[cfg(not(target_arch = "wasm32"))]
pub mod tune;

pub use dtype::{Array, DType, ValueType};
pub use ids::{InputId, Slot, StateId};
pub use shape::{MAX_RANK, Shape};

use crate::ops::{Cost, Op};
use std::sync::Arc;

/// A handle on a value of the graph; small, copyable, with its static shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    pub(crate) id: u32,
    shape: Shape,
}

impl Tensor {
    /// The static shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Size of axis `i`.
    pub fn dim(&self, i: usize) -> usize {
        self.shape.dim(i)
    }

    /// The same value under another shape with as many elements; costs nothing.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn reshaped(&self, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        assert_eq!(self.shape.len(), shape.len(), "{} cannot be reshaped to {shape}", self.shape);
        Tensor { id: self.id, shape }
    }

    /// Position in the graph's list of values.
    pub fn index(&self) -> usize {
        self.id as usize
    }
}

/// Where a value comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Uploaded before each step.
    Input(InputId),
    /// Lives across steps: parameters, optimiser state.
    State(StateId),
    /// Fixed numbers.
    Const(Arc<Vec<f64>>),
    /// Output `.1` of node `.0`.
    Node(usize, usize),
}

/// What the rows of a value are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// All there are.
    #[default]
    Whole,
    /// Those of a table (by its [`Tensor::index`]) that the ids of a batch name, each distinct id once: a table's
    /// gradient.
    Rows(usize),
}

/// One value.
#[derive(Clone, Debug)]
pub struct Value {
    /// Shape.
    pub shape: Shape,
    /// Storage type.
    pub dtype: DType,
    /// Which rows it has.
    pub form: Form,
    /// Origin.
    pub source: Source,
    /// Name for reports and errors, when someone gave one.
    pub name: Option<String>,
}

/// What a node is for in a training step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// Computes the model's outputs.
    #[default]
    Forward,
    /// Made by autodiff.
    Backward,
    /// Changes parameters and optimiser state, or prepares that.
    Update,
    /// Work of the host between ranks, wherever it stands.
    Communication,
}

/// One operation with what it reads and makes.
#[derive(Clone, Debug)]
pub struct Node {
    /// The operation.
    pub op: Arc<dyn Op>,
    /// Inputs.
    pub inputs: Vec<Tensor>,
    /// Outputs.
    pub outputs: Vec<Tensor>,
    /// Where in the model it was made, e.g. `layers.2.attention`; a backward node is where its forward node is.
    pub scope: Arc<str>,
    /// What it is for.
    pub role: Role,
}

/// An append-only list of nodes and values.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) values: Vec<Value>,
    scopes: Vec<(String, Role)>,
    /// Scope and role of the nodes made now, where they are known.
    place: Option<(Arc<str>, Role)>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// The nodes, in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The values.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The value behind a handle.
    pub fn value(&self, t: Tensor) -> &Value {
        &self.values[t.index()]
    }

    fn add_value(&mut self, shape: Shape, dtype: DType, source: Source, name: Option<String>) -> Tensor {
        let id = self.values.len() as u32;
        self.values.push(Value { shape, dtype, form: Form::Whole, source, name });
        Tensor { id, shape }
    }

    /// A float input, uploaded before each step.
    pub fn input(&mut self, id: impl Into<InputId>, shape: impl Into<Shape>) -> Tensor {
        let id = id.into();
        self.named(&id.to_string(), shape.into(), DType::F32, Source::Input(id))
    }

    /// A float input stored as `dtype`.
    pub fn input_stored(&mut self, id: impl Into<InputId>, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        let id = id.into();
        self.named(&id.to_string(), shape.into(), dtype, Source::Input(id))
    }

    /// An input of ids or offsets.
    pub fn input_ids(&mut self, id: impl Into<InputId>, shape: impl Into<Shape>) -> Tensor {
        let id = id.into();
        self.named(&id.to_string(), shape.into(), DType::U32, Source::Input(id))
    }

    /// A persistent value (parameter or optimiser state) in f32, shared by its id between graphs.
    pub fn state(&mut self, id: impl Into<StateId>, shape: impl Into<Shape>) -> Tensor {
        self.state_stored(id, shape, DType::F32)
    }

    /// A persistent value stored as `dtype`.
    pub fn state_stored(&mut self, id: impl Into<StateId>, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        let id = id.into();
        self.named(&id.to_string(), shape.into(), dtype, Source::State(id))
    }

    /// A constant, in f32.
    pub fn constant(&mut self, shape: impl Into<Shape>, data: Vec<f64>) -> Tensor {
        let shape = shape.into();
        assert_eq!(shape.len(), data.len(), "constant of shape {shape}");
        self.add_value(shape, DType::F32, Source::Const(Arc::new(data)), None)
    }

    fn named(&mut self, name: &str, shape: Shape, dtype: DType, source: Source) -> Tensor {
        let clash = self.values.iter().any(|v| match (&v.source, &source) {
            (Source::Input(a), Source::Input(b)) => a == b,
            (Source::State(a), Source::State(b)) => a == b,
            _ => false,
        });
        assert!(!clash, "the graph already has an input or state named {name}");
        self.add_value(shape, dtype, source, Some(name.into()))
    }

    /// Appends an operation; returns its outputs.
    pub fn push_multi(&mut self, op: impl Op, inputs: &[Tensor]) -> Vec<Tensor> {
        self.push_arc(Arc::new(op), inputs)
    }

    /// Appends an operation with one output.
    pub fn push(&mut self, op: impl Op, inputs: &[Tensor]) -> Tensor {
        let out = self.push_multi(op, inputs);
        assert_eq!(out.len(), 1);
        out[0]
    }

    pub(crate) fn push_arc(&mut self, op: Arc<dyn Op>, inputs: &[Tensor]) -> Vec<Tensor> {
        let shapes: Vec<Shape> = inputs.iter().map(|t| t.shape).collect();
        let types: Vec<DType> = inputs.iter().map(|t| self.value(*t).dtype).collect();
        let node = self.nodes.len();
        let made = op.outputs(&shapes);
        let stored = op.storage(&types, made.len());
        assert_eq!(made.len(), stored.len(), "{}: one storage type an output", op.name());
        let outputs: Vec<Tensor> = made
            .into_iter()
            .zip(stored)
            .enumerate()
            .map(|(i, (shape, dtype))| self.add_value(shape, dtype, Source::Node(node, i), None))
            .collect();
        let forms: Vec<Form> = inputs.iter().map(|t| self.value(*t).form).collect();
        let form = op.form(&forms);
        outputs.iter().for_each(|t| self.values[t.index()].form = form);
        let (scope, role) = self.current_place();
        let role = if op.host().is_some() { Role::Communication } else { role };
        self.nodes.push(Node { op, inputs: inputs.to_vec(), outputs: outputs.clone(), scope, role });
        outputs
    }

    fn current_place(&mut self) -> (Arc<str>, Role) {
        let scopes = &self.scopes;
        let place = self.place.get_or_insert_with(|| {
            let names: Vec<&str> = scopes.iter().map(|s| s.0.as_str()).collect();
            (names.join(".").into(), scopes.last().map_or(Role::Forward, |s| s.1))
        });
        place.clone()
    }

    /// Appends `name` to the scope of the nodes made from now on, whose role stays what it is.
    pub fn enter(&mut self, name: &str) {
        let role = self.scopes.last().map_or(Role::Forward, |s| s.1);
        self.enter_as(name, role);
    }

    /// [`Graph::enter`] where the nodes have a role of their own.
    pub fn enter_as(&mut self, name: &str, role: Role) {
        self.scopes.push((name.into(), role));
        self.place = None;
    }

    /// Undoes the last [`Graph::enter`] or [`Graph::enter_as`].
    pub fn leave(&mut self) {
        self.scopes.pop();
        self.place = None;
    }

    /// Where the nodes made from now on are; `None`: where [`Graph::enter`] says.
    pub(crate) fn set_place(&mut self, place: Option<(Arc<str>, Role)>) {
        self.place = place;
    }

    /// A state, if the graph has it.
    pub fn find_state(&self, id: &StateId) -> Option<Tensor> {
        self.values
            .iter()
            .position(|v| matches!(&v.source, Source::State(n) if n == id))
            .map(|i| Tensor { id: i as u32, shape: self.values[i].shape })
    }

    /// Appends another graph. States are shared by their ids with those that are there already; inputs are renamed by
    /// `rename`. Returns where each of the other's values is now.
    pub fn append(&mut self, other: &Graph, rename: impl Fn(&InputId) -> InputId) -> Vec<Tensor> {
        self.append_replacing(other, rename, &[])
    }

    /// [`Graph::append`] where `replaced` states of the other are read from given tensors, which may have another shape
    /// if the operations that read them bear it.
    pub fn append_replacing(
        &mut self,
        other: &Graph,
        rename: impl Fn(&InputId) -> InputId,
        replaced: &[(StateId, Tensor)],
    ) -> Vec<Tensor> {
        let mut at: Vec<Option<Tensor>> = vec![None; other.values.len()];
        let known: std::collections::HashMap<StateId, Tensor> = self
            .values
            .iter()
            .enumerate()
            .filter_map(|(i, v)| match &v.source {
                Source::State(n) => Some((n.clone(), Tensor { id: i as u32, shape: v.shape })),
                _ => None,
            })
            .collect();
        for (i, v) in other.values.iter().enumerate() {
            at[i] = match &v.source {
                Source::Input(n) => {
                    let n = rename(n);
                    Some(self.named(&n.to_string(), v.shape, v.dtype, Source::Input(n)))
                }
                Source::State(n) => Some(match replaced.iter().find(|r| r.0 == *n) {
                    Some((_, other)) => *other,
                    None => known.get(n).copied().unwrap_or_else(|| self.state_stored(n, v.shape, v.dtype)),
                }),
                Source::Const(c) => {
                    Some(self.add_value(v.shape, v.dtype, Source::Const(c.clone()), v.name.clone()))
                }
                Source::Node(..) => None,
            };
        }
        for node in &other.nodes {
            let moved = |t: &Tensor| {
                let new = at[t.index()].expect("nodes come in order");
                if new.shape.len() == t.shape.len() { new.reshaped(t.shape) } else { new }
            };
            let inputs: Vec<Tensor> = node.inputs.iter().map(moved).collect();
            self.set_place(Some((node.scope.clone(), node.role)));
            for (old, new) in node.outputs.iter().zip(self.push_arc(node.op.clone(), &inputs)) {
                let old_value = &other.values[old.index()];
                self.values[new.index()].name.clone_from(&old_value.name);
                self.take_form(new, old_value.form, |table| at[table]);
                at[old.index()] = Some(new);
            }
        }
        self.set_place(None);
        at.into_iter().map(|t| t.expect("every value has a source")).collect()
    }

    /// Says that a value is the gradient of a table in the compact form: one row per unique id of the batch.
    pub fn rows_of(&mut self, table: Tensor, t: Tensor) -> Tensor {
        self.values[t.index()].form = Form::Rows(table.index());
        t
    }

    /// Which rows a value has.
    pub fn form(&self, t: Tensor) -> Form {
        self.value(t).form
    }

    /// The form that a value had in a graph where its table was another value; whole, where that is in this one no longer.
    fn take_form(&mut self, t: Tensor, form: Form, at: impl Fn(usize) -> Option<Tensor>) {
        if let Form::Rows(table) = form
            && let Some(table) = at(table)
        {
            self.rows_of(table, t);
        }
    }

    /// Shape and storage type of what a handle stands for.
    pub fn value_type(&self, t: Tensor) -> ValueType {
        ValueType { shape: t.shape, dtype: self.value(t).dtype }
    }

    /// What a node costs.
    pub fn cost(&self, node: &Node) -> Cost {
        let types = |ts: &[Tensor]| ts.iter().map(|t| self.value_type(*t)).collect::<Vec<_>>();
        node.op.cost(&types(&node.inputs), &types(&node.outputs))
    }

    /// Gives a value a name for reports and errors.
    pub fn name(&mut self, t: Tensor, name: impl Into<String>) -> Tensor {
        self.values[t.index()].name = Some(name.into());
        t
    }

    /// A name for error messages: the given one, or the producing operation and its scope.
    pub fn describe(&self, t: Tensor) -> String {
        let v = self.value(t);
        match (&v.name, &v.source) {
            (Some(n), _) => format!("{n} {}", v.shape),
            (None, Source::Node(n, i)) => {
                let node = &self.nodes[*n];
                format!("{}:{}.{i} {}", node.scope, node.op.name(), v.shape)
            }
            _ => format!("value {} {}", t.id, v.shape),
        }
    }

    /// Ids and shapes of the states that the graph uses, in order of appearance.
    pub fn states(&self) -> Vec<(StateId, Shape)> {
        self.values
            .iter()
            .filter_map(|v| match &v.source {
                Source::State(n) => Some((n.clone(), v.shape)),
                _ => None,
            })
            .collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
