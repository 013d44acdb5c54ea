//! Nodes and constants of an ONNX graph as they are made, each with a name of its own.

use super::dims::Dims;
use super::proto::{AttributeProto, DOUBLE, FLOAT, INT64, NodeProto, TensorProto};
use std::collections::HashMap;

/// A value: its name, and its shape as its consumers may rely on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Val {
    /// Name in the file.
    pub name: String,
    /// Shape.
    pub dims: Dims,
}

impl Val {
    /// A value.
    pub fn new(name: impl Into<String>, dims: Dims) -> Self {
        Val { name: name.into(), dims }
    }
}

/// The graph under construction.
#[derive(Default)]
pub struct Emitter {
    /// Nodes in order.
    pub nodes: Vec<NodeProto>,
    /// Numbers that operations need beside the weights.
    pub constants: Vec<TensorProto>,
    /// First part of the names of nodes made from now on.
    pub scope: String,
    known: HashMap<(i32, Vec<i64>, Vec<u8>), String>,
    reshaped: HashMap<(String, Vec<i64>), String>,
}

impl Emitter {
    /// Appends a node with `outputs` outputs; returns their names.
    pub fn nodes(
        &mut self,
        op: &str,
        inputs: &[&str],
        outputs: usize,
        attribute: Vec<AttributeProto>,
    ) -> Vec<String> {
        let scope = if self.scope.is_empty() { "graph" } else { &self.scope };
        let name = format!("{scope}/{op}_{}", self.nodes.len());
        let output: Vec<String> = match outputs {
            1 => vec![name.clone()],
            _ => (0..outputs).map(|i| format!("{name}.{i}")).collect(),
        };
        self.nodes.push(NodeProto {
            input: inputs.iter().map(|s| s.to_string()).collect(),
            output: output.clone(),
            name,
            op_type: op.into(),
            attribute,
        });
        output
    }

    /// Appends a node with one output; returns its name.
    pub fn node(&mut self, op: &str, inputs: &[&str], attribute: Vec<AttributeProto>) -> String {
        self.nodes(op, inputs, 1, attribute).pop().expect("one output")
    }

    /// Appends a node without attributes and with one output; returns its name.
    pub fn call(&mut self, op: &str, inputs: &[&str]) -> String {
        self.node(op, inputs, vec![])
    }

    fn constant(&mut self, data_type: i32, dims: Vec<i64>, raw: Vec<u8>) -> String {
        let key = (data_type, dims.clone(), raw.clone());
        if let Some(name) = self.known.get(&key) {
            return name.clone();
        }
        let name = format!("constant/{}", self.constants.len());
        self.constants.push(TensorProto {
            dims,
            data_type,
            name: name.clone(),
            raw_data: Some(raw),
            ..TensorProto::default()
        });
        self.known.insert(key, name.clone());
        name
    }

    /// A vector of integers.
    pub fn ints(&mut self, v: &[i64]) -> String {
        let raw = v.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.constant(INT64, vec![v.len() as i64], raw)
    }

    /// One integer, without axes.
    pub fn int(&mut self, v: i64) -> String {
        self.constant(INT64, vec![], v.to_le_bytes().to_vec())
    }

    /// One float, without axes: it broadcasts to any shape.
    pub fn scalar(&mut self, v: f64) -> String {
        self.constant(FLOAT, vec![], (v as f32).to_le_bytes().to_vec())
    }

    /// Floats of a shape.
    pub fn floats(&mut self, dims: &[usize], v: &[f64]) -> String {
        let raw = v.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        self.constant(FLOAT, dims.iter().map(|&d| d as i64).collect(), raw)
    }

    /// Zeros of a shape, in 64 bits.
    pub fn zeros64(&mut self, dims: &[usize]) -> String {
        let n: usize = dims.iter().product();
        self.constant(DOUBLE, dims.iter().map(|&d| d as i64).collect(), vec![0; 8 * n])
    }

    /// The same elements under another shape; `None` where that shape holds the batch twice.
    pub fn reshape(&mut self, x: &Val, dims: &Dims) -> Option<Val> {
        if x.dims == *dims {
            return Some(x.clone());
        }
        let target = dims.target()?;
        let key = (x.name.clone(), target.clone());
        let name = match self.reshaped.get(&key) {
            Some(name) => name.clone(),
            None => {
                let shape = self.ints(&target);
                let name = self.call("Reshape", &[&x.name, &shape]);
                self.reshaped.insert(key, name.clone());
                name
            }
        };
        Some(Val::new(name, dims.clone()))
    }

    /// Reorders axes.
    pub fn transpose(&mut self, x: &Val, perm: &[i64]) -> Val {
        let name = self.node("Transpose", &[&x.name], vec![AttributeProto::ints("perm", perm)]);
        Val::new(name, Dims(perm.iter().map(|&p| x.dims.0[p as usize]).collect()))
    }
}
