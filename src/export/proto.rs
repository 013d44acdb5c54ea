//! The part of [ONNX's protobuf](https://github.com/onnx/onnx/blob/main/onnx/onnx.proto) that a model file
//! needs, kept by hand, so that no protobuf compiler takes part in the build. Numbers are those of onnx.proto.

use prost::Message;

/// `TensorProto.DataType`: 32-bit float.
pub const FLOAT: i32 = 1;
/// `TensorProto.DataType`: 64-bit integer.
pub const INT64: i32 = 7;
/// `TensorProto.DataType`: 64-bit float.
pub const DOUBLE: i32 = 11;

/// A model file.
#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    /// Version of the file format.
    #[prost(int64, tag = "1")]
    pub ir_version: i64,
    /// Who wrote it.
    #[prost(string, tag = "2")]
    pub producer_name: String,
    /// Its version.
    #[prost(string, tag = "3")]
    pub producer_version: String,
    /// For people.
    #[prost(string, tag = "6")]
    pub doc_string: String,
    /// The graph.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    /// Operator sets.
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Anything else, by key.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// An operator set and its version.
#[derive(Clone, PartialEq, Message)]
pub struct OperatorSetIdProto {
    /// Empty: ONNX's own.
    #[prost(string, tag = "1")]
    pub domain: String,
    /// Version.
    #[prost(int64, tag = "2")]
    pub version: i64,
}

/// A key and its value.
#[derive(Clone, PartialEq, Message)]
pub struct StringStringEntryProto {
    /// Key.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// Nodes in topological order, and the values they begin from.
#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    /// The nodes.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    /// Name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Weights and constants.
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    /// Inputs.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    /// Outputs.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
}

/// One operation.
#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    /// Names of the values that it reads.
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    /// Names of the values that it makes.
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    /// Its own name.
    #[prost(string, tag = "3")]
    pub name: String,
    /// The operator.
    #[prost(string, tag = "4")]
    pub op_type: String,
    /// Its attributes.
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
}

/// An attribute.
#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// A float.
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    /// An integer.
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    /// Integers.
    #[prost(int64, repeated, tag = "8")]
    pub ints: Vec<i64>,
    /// Which of them: 1 float, 2 integer, 7 integers.
    #[prost(int32, tag = "20")]
    pub kind: i32,
}

impl AttributeProto {
    /// A float.
    pub fn float(name: &str, v: f64) -> Self {
        Self { name: name.into(), f: Some(v as f32), kind: 1, ..Self::default() }
    }

    /// An integer.
    pub fn int(name: &str, v: i64) -> Self {
        Self { name: name.into(), i: Some(v), kind: 2, ..Self::default() }
    }

    /// Integers.
    pub fn ints(name: &str, v: &[i64]) -> Self {
        Self { name: name.into(), ints: v.to_vec(), kind: 7, ..Self::default() }
    }
}

/// A tensor, in the file or beside it.
#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    /// Shape.
    #[prost(int64, repeated, tag = "1")]
    pub dims: Vec<i64>,
    /// [`FLOAT`], [`INT64`] or [`DOUBLE`].
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    /// Name.
    #[prost(string, tag = "8")]
    pub name: String,
    /// The elements, little-endian.
    #[prost(bytes = "vec", optional, tag = "9")]
    pub raw_data: Option<Vec<u8>>,
    /// `location`, `offset` and `length` of elements in another file.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// 1: the elements are in another file.
    #[prost(int32, optional, tag = "14")]
    pub data_location: Option<i32>,
}

/// Name and type of an input or output.
#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Type.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
    /// For people.
    #[prost(string, tag = "3")]
    pub doc_string: String,
}

/// A type; always a tensor's here.
#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    /// Element type and shape.
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
}

/// Element type and shape.
#[derive(Clone, PartialEq, Message)]
pub struct TensorTypeProto {
    /// Element type.
    #[prost(int32, tag = "1")]
    pub elem_type: i32,
    /// Shape.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

/// A shape.
#[derive(Clone, PartialEq, Message)]
pub struct TensorShapeProto {
    /// Sizes.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

/// A size: a number or a name.
#[derive(Clone, PartialEq, Message)]
pub struct DimensionProto {
    /// A number.
    #[prost(int64, optional, tag = "1")]
    pub dim_value: Option<i64>,
    /// A name, for a size that is only known when the model runs.
    #[prost(string, optional, tag = "2")]
    pub dim_param: Option<String>,
}

/// Name, element type and shape (a name for a size that varies) of an input or output.
pub fn value_info(name: &str, elem_type: i32, shape: &[Result<usize, &str>], doc: &str) -> ValueInfoProto {
    let dim = shape
        .iter()
        .map(|d| DimensionProto {
            dim_value: d.ok().map(|v| v as i64),
            dim_param: d.err().map(str::to_owned),
        })
        .collect();
    let tensor = TensorTypeProto { elem_type, shape: Some(TensorShapeProto { dim }) };
    ValueInfoProto {
        name: name.into(),
        r#type: Some(TypeProto { tensor_type: Some(tensor) }),
        doc_string: doc.into(),
    }
}
