//! The graph as a picture for graphviz.

use super::{Graph, Role, Source};
use std::fmt::Write;

/// DOT text: one box an operation, clustered by scope; a quote marks clusters of the backward pass.
pub fn dot(g: &Graph, order: &[usize]) -> String {
    let mut s = String::from(
        "digraph birkhoff {\n  rankdir=TB; node [shape=box, fontname=\"sans-serif\", fontsize=10];\n",
    );
    let mut clusters: Vec<((&str, bool), Vec<usize>)> = vec![];
    for &n in order {
        let key = (&*g.nodes[n].scope, g.nodes[n].role == Role::Backward);
        match clusters.iter_mut().find(|(k, _)| *k == key) {
            Some((_, v)) => v.push(n),
            None => clusters.push((key, vec![n])),
        }
    }
    for (i, ((scope, backward), nodes)) in clusters.iter().enumerate() {
        let mark = if *backward { "'" } else { "" };
        let _ = writeln!(s, "  subgraph cluster_{i} {{ label=\"{}{mark}\"; color=gray;", escape(scope));
        for &n in nodes {
            let node = &g.nodes[n];
            let shapes: Vec<String> = node.outputs.iter().map(|t| t.shape().to_string()).collect();
            let _ = writeln!(s, "    n{n} [label=\"{}\\n{}\"];", node.op.name(), shapes.join(" "));
        }
        s.push_str("  }\n");
    }
    let mut leaves = std::collections::BTreeSet::new();
    for &n in order {
        for t in &g.nodes[n].inputs {
            match &g.value(*t).source {
                Source::Node(p, _) => {
                    let _ = writeln!(s, "  n{p} -> n{n};");
                }
                Source::Const(_) => {}
                Source::Input(_) | Source::State(_) => {
                    let v = g.value(*t);
                    let name = v.name.as_deref().unwrap_or_default();
                    leaves.insert((t.index(), name, v.shape.to_string()));
                    let _ = writeln!(s, "  v{} -> n{n};", t.index());
                }
            }
        }
    }
    for (i, name, shape) in leaves {
        let _ = writeln!(s, "  v{i} [shape=ellipse, label=\"{}\\n{shape}\"];", escape(name));
    }
    s.push_str("}\n");
    s
}

fn escape(s: &str) -> String {
    s.replace('\\', "\\\\").replace('"', "\\\"")
}
