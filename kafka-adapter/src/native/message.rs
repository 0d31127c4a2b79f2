//! A record as librdkafka holds it: read in place, freed when dropped.

use crate::client::Intake;
use rdkafka::bindings as ffi;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ptr::{self, NonNull};

/// A consumed record. Key, payload and headers are read where librdkafka holds them, without a
/// copy.
///
/// It is `Send` and not `Sync`: it moves to the worker that handles it, and librdkafka parses the
/// headers in place when they are first read.
pub struct Record {
    raw: NonNull<ffi::rd_kafka_message_t>,
}

// SAFETY: librdkafka's messages may be read and destroyed on any thread, one at a time, which
// ownership ensures. Exercised by every test in `tests/mock.rs` (read on workers, destroyed on the
// poller).
unsafe impl Send for Record {}

/// A broker's or the client's error in place of a record.
type ErrorText = (ffi::rd_kafka_resp_err_t, String);

impl Record {
    /// Takes ownership.
    ///
    /// # Safety
    /// `raw` is null, or a message from a consume call that the caller owns and gives away.
    pub(super) unsafe fn own(raw: *mut ffi::rd_kafka_message_t) -> Option<Self> {
        NonNull::new(raw).map(|raw| Record { raw })
    }

    #[inline(always)]
    fn message(&self) -> &ffi::rd_kafka_message_t {
        // SAFETY: the message is valid until `drop`; its plain fields do not change.
        unsafe { self.raw.as_ref() }
    }

    /// The error that came in place of a record, if it is one.
    pub(super) fn error(&self) -> Option<ErrorText> {
        let error = self.message().err;
        if error == ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return None;
        }
        // An error's text is its payload.
        let text = self.payload().map(|text| String::from_utf8_lossy(text).into_owned());
        Some((error, text.unwrap_or_else(|| format!("{error:?}"))))
    }

    /// The topic.
    pub fn topic(&self) -> &str {
        // SAFETY: the message holds a reference to its topic, whose name is NUL-terminated and
        // lives as long.
        let name = unsafe { CStr::from_ptr(ffi::rd_kafka_topic_name(self.message().rkt)) };
        // Kafka allows only ASCII letters, digits, `.`, `_` and `-` in topic names.
        name.to_str().unwrap_or_default()
    }

    /// The partition.
    #[inline]
    pub fn partition(&self) -> i32 {
        self.message().partition
    }

    /// The offset.
    #[inline]
    pub fn offset(&self) -> i64 {
        self.message().offset
    }

    /// The key; `None` is a null key, which is not the same as an empty one.
    #[inline]
    pub fn key(&self) -> Option<&[u8]> {
        let message = self.message();
        // SAFETY: a non-null key has `key_len` bytes, which live as long as the message.
        unsafe { bytes(message.key, message.key_len) }
    }

    /// The value; `None` is a null value (a tombstone), which is not the same as an empty one.
    #[inline]
    pub fn payload(&self) -> Option<&[u8]> {
        let message = self.message();
        // SAFETY: a non-null payload has `len` bytes, which live as long as the message.
        unsafe { bytes(message.payload, message.len) }
    }

    /// Milliseconds since 1970-01-01 UTC, by the producer's or the broker's clock as the topic is
    /// configured; `None` for records that have none.
    pub fn timestamp(&self) -> Option<i64> {
        let mut kind = ffi::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE;
        // SAFETY: the message is valid and `kind` is ours to write.
        let time = unsafe { ffi::rd_kafka_message_timestamp(self.raw.as_ptr(), &raw mut kind) };
        (kind != ffi::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE && time >= 0)
            .then_some(time)
    }

    /// The epoch of the leader that served the record, if the broker told.
    pub fn leader_epoch(&self) -> Option<i32> {
        // SAFETY: the message is valid.
        let epoch = unsafe { ffi::rd_kafka_message_leader_epoch(self.raw.as_ptr()) };
        (epoch >= 0).then_some(epoch)
    }

    /// The headers in their order. Names may repeat; a value may be null.
    pub fn headers(&self) -> Headers<'_> {
        let mut headers = ptr::null_mut();
        // SAFETY: the message is valid; librdkafka parses its headers on the first call, which
        // cannot run twice at once because `Record` is not `Sync`. They belong to the message.
        let error = unsafe { ffi::rd_kafka_message_headers(self.raw.as_ptr(), &raw mut headers) };
        let none = error != ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR;
        Headers { headers: if none { None } else { NonNull::new(headers) }, next: 0, record: self }
    }

    /// The value of the last header of this name; `None` when there is none or its value is null.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers().filter(|(n, _)| *n == name).last().and_then(|(_, value)| value)
    }
}

/// # Safety
/// `data` is null, or points to `len` bytes that live for `'a`.
#[inline(always)]
unsafe fn bytes<'a>(data: *const c_void, len: usize) -> Option<&'a [u8]> {
    // SAFETY: see above.
    (!data.is_null()).then(|| unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) })
}

impl Intake for Record {
    #[inline]
    fn offset(&self) -> i64 {
        self.offset()
    }

    #[inline]
    fn key(&self) -> Option<&[u8]> {
        self.key()
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record")
            .field("topic", &self.topic())
            .field("partition", &self.partition())
            .field("offset", &self.offset())
            .finish_non_exhaustive()
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // SAFETY: the message is ours and goes exactly once. It holds what it needs of its client,
        // so it may even outlive it. Exercised by `b41_a_stuck_handler_does_not_hold_the_end`.
        unsafe { ffi::rd_kafka_message_destroy(self.raw.as_ptr()) };
    }
}

/// Headers of a [`Record`]: name and value.
#[derive(Debug)]
pub struct Headers<'a> {
    headers: Option<NonNull<ffi::rd_kafka_headers_t>>,
    next: usize,
    /// Whose headers they are: keeps them alive.
    record: &'a Record,
}

impl<'a> Iterator for Headers<'a> {
    type Item = (&'a str, Option<&'a [u8]>);

    fn next(&mut self) -> Option<Self::Item> {
        let headers = self.headers?;
        let mut name: *const c_char = ptr::null();
        let mut value: *const c_void = ptr::null();
        let mut size = 0;
        // SAFETY: the headers belong to `record`, which is borrowed; the rest is ours to write.
        let error = unsafe {
            ffi::rd_kafka_header_get_all(
                headers.as_ptr(),
                self.next,
                &raw mut name,
                &raw mut value,
                &raw mut size,
            )
        };
        if error != ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return None;
        }
        self.next += 1;
        let _: &'a Record = self.record;
        // SAFETY: name and value live as long as the message, which is borrowed for `'a`; the name
        // is NUL-terminated, the value has `size` bytes unless it is null.
        let (name, value) = unsafe { (CStr::from_ptr(name), bytes(value, size)) };
        Some((name.to_str().unwrap_or_default(), value))
    }
}
