//! What the safe wrapper of librdkafka's mock cluster lacks.

use rdkafka::bindings as ffi;
use rdkafka::client::{Client, ClientContext};

/// Not public: sets how long the coordinator of a mock cluster waits for members before a group's
/// first rebalance (by default 3 s). `client` is one that was created with
/// `test.mock.num.brokers`. Whether it has a mock cluster.
#[doc(hidden)]
pub fn hasten_first_rebalance<C: ClientContext>(client: &Client<C>, delay_ms: i32) -> bool {
    // SAFETY: the client is live; the cluster belongs to it and lives as long. Exercised by every
    // test in `tests/mock.rs`.
    unsafe {
        let cluster = ffi::rd_kafka_handle_mock_cluster(client.native_ptr());
        if cluster.is_null() {
            return false;
        }
        ffi::rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, delay_ms);
    }
    true
}
