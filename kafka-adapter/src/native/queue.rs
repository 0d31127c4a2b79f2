//! librdkafka queues: one per partition, and one for the answers to commits.

use super::message::Record;
use plimsoll_engine::Waker;
use rdkafka::bindings as ffi;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// "There may be something", set by librdkafka's threads, cleared by the poller before it looks.
#[derive(Debug)]
pub(crate) struct Signal {
    ready: AtomicBool,
    waker: Waker,
}

impl Signal {
    pub(crate) fn new(waker: Waker) -> Arc<Self> {
        // Set at first: whatever arrived before the callback was registered is looked at.
        Arc::new(Signal { ready: AtomicBool::new(true), waker })
    }

    pub(crate) fn set(&self) {
        // Release: pairs with `clear`; and the waker fences before it looks for a sleeper.
        self.ready.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Takes it for set, without waking anybody: for the poller's own use.
    pub(crate) fn assume(&self) {
        // Relaxed: read by the same thread.
        self.ready.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        // Relaxed: a hint; `clear` synchronises.
        self.ready.load(Ordering::Relaxed)
    }

    pub(crate) fn clear(&self) {
        // Acquire: pairs with `set`. Cleared before looking, so that an arrival during the look
        // sets it again. AcqRel swap, because a plain store could move behind the look.
        self.ready.swap(false, Ordering::AcqRel);
    }
}

/// Where a batch call writes its messages; empty between two calls.
#[derive(Debug, Default)]
pub(super) struct Scratch(Vec<*mut ffi::rd_kafka_message_t>);

// SAFETY: between two calls it holds no pointer at all, only capacity.
unsafe impl Send for Scratch {}

/// An owned reference to a librdkafka queue, with the callback that says when it fills.
#[derive(Debug)]
pub(crate) struct Queue {
    raw: NonNull<ffi::rd_kafka_queue_t>,
    /// What the callback's opaque pointer points to.
    signal: Arc<Signal>,
}

// SAFETY: librdkafka's queues may be used from any thread; `Queue` is used from one at a time
// (`&mut self` or the poller's ownership). Exercised by every test in `tests/mock.rs`.
unsafe impl Send for Queue {}

/// Runs on librdkafka's threads, with the queue's lock held: sets a flag and wakes the poller.
unsafe extern "C" fn not_empty(_: *mut ffi::rd_kafka_t, opaque: *mut c_void) {
    // SAFETY: `opaque` is the `Arc<Signal>` of the `Queue` that registered this callback; the
    // queue unregisters it (under the same lock) before it lets go of the `Arc`.
    let signal = unsafe { &*opaque.cast::<Signal>() };
    signal.set();
}

impl Queue {
    /// Takes ownership of a reference.
    ///
    /// # Safety
    /// `raw` is null, or a queue reference that the caller owns and gives away, of a client that
    /// outlives the `Queue`.
    unsafe fn own(raw: *mut ffi::rd_kafka_queue_t, signal: Arc<Signal>) -> Option<Self> {
        let queue = Queue { raw: NonNull::new(raw)?, signal };
        let opaque = Arc::as_ptr(&queue.signal).cast_mut().cast::<c_void>();
        // SAFETY: the queue is valid; the opaque pointer stays valid until `drop` unregisters it.
        unsafe { ffi::rd_kafka_queue_cb_event_enable(queue.raw.as_ptr(), Some(not_empty), opaque) };
        Some(queue)
    }

    /// A fresh queue of the application's own.
    ///
    /// # Safety
    /// `client` is a live client that outlives the queue.
    pub(super) unsafe fn new(client: *mut ffi::rd_kafka_t, signal: Arc<Signal>) -> Option<Self> {
        // SAFETY: the client is live; the new reference is ours.
        unsafe { Queue::own(ffi::rd_kafka_queue_new(client), signal) }
    }

    /// The fetch queue of a partition, cut off from the consumer's own queue. To be called before
    /// the partition is assigned, each time it is: else its first records go to the wrong queue.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    pub(super) unsafe fn of_partition(
        client: *mut ffi::rd_kafka_t,
        topic: &CStr,
        partition: i32,
        signal: Arc<Signal>,
    ) -> Option<Self> {
        // SAFETY: the client is live, the name is NUL-terminated, and the returned reference is
        // ours; a null one is sorted out below.
        let raw = unsafe { ffi::rd_kafka_queue_get_partition(client, topic.as_ptr(), partition) };
        if raw.is_null() {
            return None;
        }
        // SAFETY: the queue is valid; a null destination ends its forwarding.
        unsafe { ffi::rd_kafka_queue_forward(raw, ptr::null_mut()) };
        // SAFETY: see above.
        unsafe { Queue::own(raw, signal) }
    }

    pub(crate) fn signal(&self) -> &Signal {
        &self.signal
    }

    /// Moves at most `most` records into `out`. `Err` names the error that came in place of one.
    pub(super) fn take(
        &mut self,
        most: usize,
        Scratch(buffer): &mut Scratch,
        out: &mut Vec<Record>,
    ) -> Result<(), (ffi::rd_kafka_resp_err_t, String)> {
        self.signal.clear();
        buffer.clear();
        buffer.resize(most, ptr::null_mut());
        // A time-out of 0: any other waits for `most` records or for the whole of it.
        // SAFETY: the queue is valid and the buffer has room for `most` pointers.
        let count = unsafe {
            ffi::rd_kafka_consume_batch_queue(self.raw.as_ptr(), 0, buffer.as_mut_ptr(), most)
        };
        let count = usize::try_from(count).unwrap_or(0);
        if count == most {
            // There may be more, and no edge will tell.
            self.signal.assume();
        }
        let mut result = Ok(());
        for raw in buffer.drain(..).take(count) {
            // SAFETY: librdkafka wrote `count` messages that are the caller's to destroy.
            let Some(record) = (unsafe { Record::own(raw) }) else { continue };
            match record.error() {
                None => out.push(record),
                // The end of a partition is no error, and nobody asked to hear of it.
                Some((ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR__PARTITION_EOF, _)) => {}
                Some(error) => result = Err(error),
            }
        }
        result
    }

    /// The next event, if any.
    pub(super) fn event(&mut self) -> Option<QueueEvent> {
        // SAFETY: the queue is valid; the returned event is ours to destroy.
        let raw = unsafe { ffi::rd_kafka_queue_poll(self.raw.as_ptr(), 0) };
        NonNull::new(raw).map(QueueEvent)
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::rd_kafka_queue_t {
        self.raw.as_ptr()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the queue is valid. Unregistering takes the lock under which callbacks run, so
        // none runs afterwards and `signal` may go. The reference is ours and goes exactly once.
        unsafe {
            ffi::rd_kafka_queue_cb_event_enable(self.raw.as_ptr(), None, ptr::null_mut());
            ffi::rd_kafka_queue_destroy(self.raw.as_ptr());
        }
    }
}

/// An owned event.
#[derive(Debug)]
pub(super) struct QueueEvent(NonNull<ffi::rd_kafka_event_t>);

/// One element of an offset commit's or a look-up's answer.
#[derive(Debug)]
pub(super) struct CommittedElement {
    pub(super) topic: String,
    pub(super) partition: i32,
    pub(super) offset: i64,
    pub(super) metadata: Vec<u8>,
    pub(super) error: ffi::rd_kafka_resp_err_t,
}

impl QueueEvent {
    /// Whether it answers an offset commit.
    pub(super) fn is_commit(&self) -> bool {
        // SAFETY: the event is valid.
        let kind = unsafe { ffi::rd_kafka_event_type(self.0.as_ptr()) };
        kind == ffi::RD_KAFKA_EVENT_OFFSET_COMMIT
    }

    /// The error of the whole request.
    pub(super) fn error(&self) -> ffi::rd_kafka_resp_err_t {
        // SAFETY: the event is valid.
        unsafe { ffi::rd_kafka_event_error(self.0.as_ptr()) }
    }

    /// The partitions of the request, each with its own error.
    pub(super) fn elements(&self) -> Vec<CommittedElement> {
        // SAFETY: the event is valid; the list belongs to it and is only read here, while it lives.
        unsafe { elements_of(ffi::rd_kafka_event_topic_partition_list(self.0.as_ptr())) }
    }

    /// The number of the look-up that this answers, if it does.
    pub(super) fn look_up(&self) -> Option<usize> {
        // SAFETY: the event is valid.
        let kind = unsafe { ffi::rd_kafka_event_type(self.0.as_ptr()) };
        // SAFETY: the event is valid. The opaque value is the number, see `look_up`.
        (kind == ffi::RD_KAFKA_EVENT_LISTCONSUMERGROUPOFFSETS_RESULT)
            .then(|| unsafe { ffi::rd_kafka_event_opaque(self.0.as_ptr()) } as usize)
    }

    /// The error of a look-up's group, and what it found.
    pub(super) fn found(&self) -> Result<Vec<CommittedElement>, ffi::rd_kafka_resp_err_t> {
        let whole = self.error();
        if whole != ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return Err(whole);
        }
        // SAFETY: the event is valid; the result and all that hangs on it belong to it and are only
        // read here, while it lives. Null pointers and a count of 0 are sorted out.
        unsafe {
            let result = ffi::rd_kafka_event_ListConsumerGroupOffsets_result(self.0.as_ptr());
            if result.is_null() {
                return Ok(Vec::new());
            }
            let mut count = 0;
            let groups = ffi::rd_kafka_ListConsumerGroupOffsets_result_groups(result, &mut count);
            if groups.is_null() || count == 0 {
                return Ok(Vec::new());
            }
            // One group was asked for.
            let group = *groups;
            let error = ffi::rd_kafka_group_result_error(group);
            if !error.is_null() {
                return Err(ffi::rd_kafka_error_code(error));
            }
            Ok(elements_of(ffi::rd_kafka_group_result_partitions(group)))
        }
    }
}

/// Copies a list of partitions.
///
/// # Safety
/// `list` is null or valid for the call.
unsafe fn elements_of(list: *const ffi::rd_kafka_topic_partition_list_t) -> Vec<CommittedElement> {
    // SAFETY: the caller's.
    let list = unsafe { list.as_ref() };
    let Some(list) = list.filter(|list| !list.elems.is_null()) else { return Vec::new() };
    let count = usize::try_from(list.cnt).unwrap_or(0);
    // SAFETY: `elems` points to `cnt` elements.
    let elements = unsafe { std::slice::from_raw_parts(list.elems, count) };
    elements
        .iter()
        .map(|element| CommittedElement {
            // SAFETY: the name is NUL-terminated and lives as long as the list.
            topic: unsafe { CStr::from_ptr(element.topic) }.to_string_lossy().into_owned(),
            partition: element.partition,
            offset: element.offset,
            metadata: if element.metadata.is_null() {
                Vec::new()
            } else {
                let bytes = element.metadata.cast::<u8>().cast_const();
                // SAFETY: so many bytes belong to the element, and it lives as long as the list.
                unsafe { std::slice::from_raw_parts(bytes, element.metadata_size) }.to_vec()
            },
            error: element.err,
        })
        .collect()
}

/// Asks for what a group has committed; the answer comes to `queue` and names `number`. No reference
/// to a partition stays behind, unlike with `rd_kafka_committed`.
///
/// # Safety
/// `client` is live, outlives `queue`, and `list` is valid and not empty.
pub(super) unsafe fn look_up(
    client: *mut ffi::rd_kafka_t,
    queue: &Queue,
    number: usize,
    group: &CStr,
    list: *const ffi::rd_kafka_topic_partition_list_t,
    limit_ms: c_int,
) -> Result<(), String> {
    let operation = ffi::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_LISTCONSUMERGROUPOFFSETS;
    let mut reason: [c_char; 256] = [0; 256];
    // SAFETY: what is passed is valid by the caller's word; what is created here is destroyed here,
    // as librdkafka copies both. The opaque value is a number, never followed. Exercised by
    // `tests/resume.rs`.
    unsafe {
        let options = ffi::rd_kafka_AdminOptions_new(client, operation);
        if options.is_null() {
            return Err("no options for the look-up".to_owned());
        }
        let code = ffi::rd_kafka_AdminOptions_set_request_timeout(
            options,
            limit_ms,
            reason.as_mut_ptr(),
            reason.len(),
        );
        ffi::rd_kafka_AdminOptions_set_opaque(options, number as *mut c_void);
        let result = if code == ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            let mut request = ffi::rd_kafka_ListConsumerGroupOffsets_new(group.as_ptr(), list);
            ffi::rd_kafka_ListConsumerGroupOffsets(
                client,
                &mut request,
                1,
                options,
                queue.raw.as_ptr(),
            );
            ffi::rd_kafka_ListConsumerGroupOffsets_destroy(request);
            Ok(())
        } else {
            Err(CStr::from_ptr(reason.as_ptr()).to_string_lossy().into_owned())
        };
        ffi::rd_kafka_AdminOptions_destroy(options);
        result
    }
}

impl Drop for QueueEvent {
    fn drop(&mut self) {
        // SAFETY: the event is ours and goes exactly once.
        unsafe { ffi::rd_kafka_event_destroy(self.0.as_ptr()) };
    }
}
