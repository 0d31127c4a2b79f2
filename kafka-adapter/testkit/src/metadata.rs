//! What single brokers know about the cluster.
//!
//! A client of librdkafka asks whichever broker it likes, and what it has heard stays in its cache; here it matters
//! which broker says what at which time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kafka_protocol::error::ParseResponseErrorCode;
use kafka_protocol::messages::metadata_response::{
    MetadataResponsePartition, MetadataResponseTopic,
};
use kafka_protocol::messages::{ApiKey, BrokerId, MetadataRequest, MetadataResponse};

use crate::client::{LIMIT, can_create_topics};
use crate::cluster::Cluster;
use crate::error::Error;
use crate::wire::{Failure, call};

/// All topics of a broker's metadata.
fn metadata(address: SocketAddr) -> Result<MetadataResponse, Failure> {
    let request =
        MetadataRequest::default().with_topics(None).with_allow_auto_topic_creation(false);
    call(address, ApiKey::Metadata, 12, &request)
}

fn topic<'a>(metadata: &'a MetadataResponse, name: &str) -> Option<&'a MetadataResponseTopic> {
    metadata.topics.iter().find(|topic| {
        topic.error_code.is_ok() && topic.name.as_ref().is_some_and(|found| **found == *name)
    })
}

/// One check of a broker that starts; the error says what is missing. Ready is a broker that knows all of `known`, has
/// a leader for each partition that one of them can lead, and gets a topic through the controller.
pub(crate) fn probe(address: SocketAddr, known: &[i32]) -> Result<(), String> {
    let metadata = match metadata(address) {
        Ok(metadata) => metadata,
        Err(Failure::Passing(reason) | Failure::Lasting(reason)) => return Err(reason),
    };
    for id in known {
        if !metadata.brokers.iter().any(|broker| broker.node_id == *id) {
            return Err(format!("broker {id} is not in the metadata"));
        }
    }
    for topic in &metadata.topics {
        for partition in &topic.partitions {
            let leads = |id: &BrokerId| known.contains(&id.0);
            if partition.leader_id.0 < 0 && partition.isr_nodes.iter().any(leads) {
                let name = topic.name.as_ref().map_or("", |name| name.as_str());
                let number = partition.partition_index;
                return Err(format!("partition {number} of topic `{name}` has no leader"));
            }
        }
    }
    can_create_topics(address).map_err(|error| format!("no topic can be created: {error}"))
}

impl Cluster {
    /// Waits until every reachable broker says so.
    pub(crate) fn wait_for_all(
        &self,
        what: &str,
        satisfied: impl Fn(SocketAddr) -> Result<bool, Failure>,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + LIMIT;
        for address in self.reachable()? {
            // A broker that is killed meanwhile is no longer waited for.
            while self.reachable()?.contains(&address) {
                match satisfied(address) {
                    Ok(true) => break,
                    Ok(false) | Err(Failure::Passing(_)) => {}
                    Err(Failure::Lasting(reason)) => {
                        let request = format!("wait for {what}");
                        return Err(Error::Refused { request, reason });
                    }
                }
                if Instant::now() >= deadline {
                    return Err(Error::Timeout { what: what.into(), limit: LIMIT });
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    pub(crate) fn wait_for_partitions(&self, name: &str, partitions: i32) -> Result<(), Error> {
        self.wait_for_all(&format!("leaders for topic `{name}`"), |address| {
            let metadata = metadata(address)?;
            Ok(topic(&metadata, name).is_some_and(|topic| {
                topic.partitions.len() == partitions as usize
                    && topic.partitions.iter().all(|p| p.leader_id.0 >= 0)
            }))
        })
    }

    pub(crate) fn wait_for_absence(&self, name: &str) -> Result<(), Error> {
        self.wait_for_all(&format!("the end of topic `{name}`"), |address| {
            Ok(topic(&metadata(address)?, name).is_none())
        })
    }

    /// The broker that leads a partition; `None` while there is none.
    ///
    /// # Errors
    ///
    /// If there is no such partition.
    pub fn leader(&self, topic: &str, partition: i32) -> Result<Option<usize>, Error> {
        self.partition(topic, partition, |found| usize::try_from(found.leader_id.0).ok())
    }

    /// The brokers whose replicas of a partition are in sync, in ascending order.
    ///
    /// # Errors
    ///
    /// If there is no such partition.
    pub fn in_sync(&self, topic: &str, partition: i32) -> Result<Vec<usize>, Error> {
        self.partition(topic, partition, |found| {
            let mut brokers: Vec<usize> =
                found.isr_nodes.iter().filter_map(|id| usize::try_from(id.0).ok()).collect();
            brokers.sort_unstable();
            brokers
        })
    }

    fn partition<T>(
        &self,
        name: &str,
        partition: i32,
        describe: impl Fn(&MetadataResponsePartition) -> T,
    ) -> Result<T, Error> {
        let request = format!("find partition {partition} of topic `{name}`");
        self.ask(&request, |address| {
            let metadata = metadata(address)?;
            topic(&metadata, name)
                .and_then(|topic| {
                    let mut partitions = topic.partitions.iter();
                    partitions.find(|found| found.partition_index == partition)
                })
                .map(&describe)
                .ok_or_else(|| Failure::Lasting("there is none".into()))
        })
    }
}
