//! Requests that librdkafka or its binding has no safe or no working form for, spoken directly.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{ApiKey, RequestHeader, ResponseHeader};
use kafka_protocol::protocol::{
    Decodable, Encodable, HeaderVersion, StrBytes, encode_request_header_into_buffer,
};

use crate::client::LIMIT;
use crate::cluster::Cluster;
use crate::error::Error;

/// How long one answer may take.
const ANSWER: Duration = Duration::from_secs(10);

/// The largest answer that is believed.
const LARGEST: usize = 64 << 20;

/// Why a request failed.
pub(crate) enum Failure {
    /// It may work in a moment.
    Passing(String),
    /// It will fail again.
    Lasting(String),
}

impl Failure {
    /// An error along with what the broker said about it.
    pub(crate) fn told(error: ResponseError, message: Option<StrBytes>) -> Self {
        match (Self::from(error), message) {
            (Self::Passing(reason), Some(message)) => Self::Passing(format!("{reason} {message}")),
            (Self::Lasting(reason), Some(message)) => Self::Lasting(format!("{reason} {message}")),
            (failure, None) => failure,
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Passing(error.to_string())
    }
}

impl From<ResponseError> for Failure {
    fn from(error: ResponseError) -> Self {
        // What is missing from the metadata of one broker may be on its way there, but not for long: the requests that
        // create topics here return when all brokers know them.
        let missing = error == ResponseError::UnknownTopicOrPartition;
        if error.is_retriable() && !missing {
            Self::Passing(error.to_string())
        } else {
            Self::Lasting(error.to_string())
        }
    }
}

impl Cluster {
    /// Asks one reachable broker after the other until one has an answer, a request fails for good, or the time is
    /// over.
    pub(crate) fn ask<T>(
        &self,
        name: &str,
        ask: impl Fn(SocketAddr) -> Result<T, Failure>,
    ) -> Result<T, Error> {
        let refused = |reason| Error::Refused { request: name.into(), reason };
        let deadline = Instant::now() + LIMIT;
        loop {
            let mut last = String::new();
            for address in self.reachable()? {
                match ask(address) {
                    Ok(answer) => return Ok(answer),
                    Err(Failure::Passing(reason)) => last = reason,
                    Err(Failure::Lasting(reason)) => return Err(refused(reason)),
                }
            }
            if Instant::now() >= deadline {
                return Err(refused(last));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Sends one request over a connection of its own and reads the answer.
pub(crate) fn call<Q, R>(
    address: SocketAddr,
    key: ApiKey,
    version: i16,
    request: &Q,
) -> Result<R, Failure>
where
    Q: Encodable,
    R: Decodable + HeaderVersion,
{
    let format = |error: &dyn std::fmt::Display| Failure::Lasting(format!("{key:?}: {error}"));
    let header = RequestHeader::default()
        .with_request_api_key(key as i16)
        .with_request_api_version(version)
        .with_client_id(Some(StrBytes::from_static_str("plimsoll-testkit")));
    let mut body = BytesMut::new();
    encode_request_header_into_buffer(&mut body, &header)
        .and_then(|()| request.encode(&mut body, version))
        .map_err(|error| format(&error))?;
    let length = u32::try_from(body.len()).map_err(|error| format(&error))?;

    let mut stream = TcpStream::connect_timeout(&address, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    stream.write_all(&[&length.to_be_bytes()[..], &body].concat())?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > LARGEST {
        return Err(format(&format_args!("an answer of {length} bytes")));
    }
    let mut answer = vec![0; length];
    stream.read_exact(&mut answer)?;
    let mut answer = Bytes::from(answer);
    ResponseHeader::decode(&mut answer, R::header_version(version))
        .and_then(|_| R::decode(&mut answer, version))
        .map_err(|error| format(&error))
}
