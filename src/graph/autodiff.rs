//! Reverse-mode differentiation: appends the backward graph, node by node from the loss.

use super::{DType, Form, Graph, Role, Tensor};
use crate::ops::Vjp;

impl Graph {
    /// The gradient of the scalar `loss` with respect to each of `wrt`; zeros where it does not depend on it.
    ///
    /// The gradient of an embedding table is in the compact form that its gather makes, [`Form::Rows`]: one row per
    /// unique id of the batch (see `ops::embedding`), so its shape is not the table's.
    ///
    /// # Panics
    /// If the loss is not a single element, or a table feeds more than one gather.
    pub fn gradients(&mut self, loss: Tensor, wrt: &[Tensor]) -> Vec<Tensor> {
        assert_eq!(loss.shape().len(), 1, "a loss is one number");
        let seed = self.constant([1], vec![1.0]);
        self.gradients_from(&[(loss, seed.reshaped(loss.shape()))], wrt)
    }

    /// The same for several outputs with given cotangents.
    pub fn gradients_from(&mut self, seeds: &[(Tensor, Tensor)], wrt: &[Tensor]) -> Vec<Tensor> {
        // which values depend on a wanted one
        let mut depends = vec![false; self.values.len()];
        for t in wrt {
            depends[t.index()] = true;
        }
        let n_nodes = self.nodes.len();
        for n in 0..n_nodes {
            let node = &self.nodes[n];
            if node.inputs.iter().any(|t| depends[t.index()]) {
                for o in node.outputs.clone() {
                    depends[o.index()] = true;
                }
            }
        }
        let mut grads: Vec<Option<Tensor>> = vec![None; self.values.len()];
        for &(t, g) in seeds {
            self.accumulate(&mut grads, t, g);
        }
        for n in (0..n_nodes).rev() {
            let node = self.nodes[n].clone();
            let wanted: Vec<bool> = node.inputs.iter().map(|t| depends[t.index()]).collect();
            if !wanted.contains(&true) || node.outputs.iter().all(|o| grads[o.index()].is_none()) {
                continue;
            }
            let of: Vec<Option<Tensor>> =
                node.outputs.iter().map(|o| grads[o.index()].map(|g| self.shaped(g, *o))).collect();
            self.set_place(Some((node.scope.clone(), Role::Backward)));
            let v = Vjp { inputs: &node.inputs, outputs: &node.outputs, grads: &of, wanted: &wanted };
            let back = node.op.vjp(self, &v);
            assert_eq!(
                back.len(),
                node.inputs.len(),
                "vjp of {} returns one gradient an input",
                node.op.name()
            );
            for (i, g) in back.into_iter().enumerate() {
                if let Some(g) = g.filter(|_| wanted[i]) {
                    self.accumulate(&mut grads, node.inputs[i], g);
                }
            }
            self.set_place(None);
        }
        wrt.iter()
            .map(|t| match grads[t.index()] {
                Some(g) => self.shaped(g, *t),
                None => {
                    let zeros = self.constant(t.shape(), vec![0.0; t.shape().len()]);
                    self.stored_as(zeros, *t)
                }
            })
            .collect()
    }

    /// A gradient in the shape of its value; a table's rows have their own.
    fn shaped(&self, g: Tensor, of: Tensor) -> Tensor {
        match self.form(g) {
            Form::Whole => g.reshaped(of.shape()),
            Form::Rows(_) => g,
        }
    }

    /// A gradient has the storage type of its value.
    fn stored_as(&mut self, g: Tensor, of: Tensor) -> Tensor {
        match self.value(of).dtype {
            DType::U32 => g,
            dtype => self.cast(g, dtype),
        }
    }

    fn accumulate(&mut self, grads: &mut [Option<Tensor>], of: Tensor, g: Tensor) {
        grads[of.index()] = Some(match grads[of.index()] {
            None => self.stored_as(g, of),
            Some(old) => {
                assert_eq!(
                    (self.form(old), self.form(g)),
                    (Form::Whole, Form::Whole),
                    "two gradients of {}: a table may feed one gather only",
                    self.describe(of)
                );
                // halves are added in f32
                let [a, b] = [old, g.reshaped(old.shape())].map(|x| self.cast(x, DType::F32));
                let sum = self.add(a, b);
                self.stored_as(sum, of)
            }
        });
    }
}
