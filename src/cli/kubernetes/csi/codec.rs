//! Encodes and decodes messages whose types are known only when the program runs.

use prost::Message;
use prost_reflect::{DynamicMessage, MessageDescriptor};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// The codec of a call whose answer has the type `answer`.
#[derive(Debug)]
pub(super) struct Dynamic {
    answer: MessageDescriptor,
}

impl Dynamic {
    /// Creates the codec of a call.
    pub(super) fn new(answer: MessageDescriptor) -> Self {
        Self { answer }
    }
}

impl Codec for Dynamic {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = Requests;
    type Decoder = Answers;

    fn encoder(&mut self) -> Requests {
        Requests
    }

    fn decoder(&mut self) -> Answers {
        Answers(self.answer.clone())
    }
}

#[derive(Debug)]
pub(super) struct Requests;

impl Encoder for Requests {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, item: DynamicMessage, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

#[derive(Debug)]
pub(super) struct Answers(MessageDescriptor);

impl Decoder for Answers {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let decoded = DynamicMessage::decode(self.0.clone(), buffer);
        decoded.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}
