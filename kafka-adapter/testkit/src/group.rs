//! Who is in a group and what it has committed, asked of the group's coordinator.
//!
//! librdkafka's own list of groups knows the classic protocol only, and its binding must not be given an unknown group. For
//! offsets it would take a consumer, whose end takes a tenth of a second.

use std::net::SocketAddr;

use bytes::{Buf, Bytes};
use kafka_protocol::error::{ParseResponseErrorCode, ResponseError};
use kafka_protocol::messages::offset_fetch_request::{
    OffsetFetchRequestGroup, OffsetFetchRequestTopics,
};
use kafka_protocol::messages::{
    ApiKey, ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse,
    ConsumerProtocolAssignment, DescribeGroupsRequest, DescribeGroupsResponse,
    FindCoordinatorRequest, FindCoordinatorResponse, GroupId, OffsetFetchRequest,
    OffsetFetchResponse, TopicName,
};
use kafka_protocol::protocol::{Decodable, StrBytes};

use crate::cluster::Cluster;
use crate::error::Error;
use crate::wire::{Failure, call};

/// A member of a consumer group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The id that the group knows the member by.
    pub id: String,
    /// The member's `client.id`.
    pub client_id: String,
    /// The member's address as the broker sees it.
    pub host: String,
    /// The partitions assigned to it, in ascending order.
    pub partitions: Vec<(String, i32)>,
}

/// What a group has committed for a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The next offset to read.
    pub offset: i64,
    /// What was committed along with it; empty if nothing.
    pub metadata: String,
}

impl Cluster {
    /// What a group has committed for a partition; `None` if nothing.
    ///
    /// # Errors
    ///
    /// If the group's coordinator cannot be reached.
    pub fn committed(
        &self,
        group: &str,
        topic: &str,
        partition: i32,
    ) -> Result<Option<Committed>, Error> {
        let request = format!("get the offsets of group `{group}`");
        self.ask(&request, |address| {
            let coordinator = coordinator(address, group)?;
            committed(coordinator.address, group, topic, partition)
        })
    }

    /// The members of a group of the classic or the new protocol, in the order of their ids; none if there is no such
    /// group.
    ///
    /// # Errors
    ///
    /// If the group's coordinator cannot be reached.
    pub fn group_members(&self, group: &str) -> Result<Vec<Member>, Error> {
        self.ask(&format!("describe group `{group}`"), |address| {
            let coordinator = coordinator(address, group)?;
            let members = match describe(coordinator.address, group)? {
                Some(members) => members,
                None => describe_classic(coordinator.address, group)?,
            };
            Ok(members)
        })
    }

    /// The broker that coordinates a group.
    ///
    /// # Errors
    ///
    /// If no broker knows the coordinator.
    pub fn coordinator(&self, group: &str) -> Result<usize, Error> {
        let name = format!("find the coordinator of group `{group}`");
        self.ask(&name, |address| Ok(coordinator(address, group)?.broker))
    }
}

struct Coordinator {
    broker: usize,
    address: SocketAddr,
}

fn coordinator(address: SocketAddr, group: &str) -> Result<Coordinator, Failure> {
    let request =
        FindCoordinatorRequest::default().with_key(StrBytes::from_string(group.to_owned()));
    let found: FindCoordinatorResponse = call(address, ApiKey::FindCoordinator, 3, &request)?;
    if let Some(error) = found.error_code.err() {
        return Err(error.into());
    }
    let parsed = || {
        Some(Coordinator {
            broker: usize::try_from(found.node_id.0).ok()?,
            address: SocketAddr::new(found.host.parse().ok()?, u16::try_from(found.port).ok()?),
        })
    };
    parsed().ok_or_else(|| {
        let (host, port) = (&found.host, found.port);
        Failure::Lasting(format!("the coordinator is said to be at {host}:{port}"))
    })
}

fn committed(
    address: SocketAddr,
    group: &str,
    topic: &str,
    partition: i32,
) -> Result<Option<Committed>, Failure> {
    let owned = |text: &str| StrBytes::from_string(text.to_owned());
    let topic = OffsetFetchRequestTopics::default()
        .with_name(TopicName(owned(topic)))
        .with_partition_indexes(vec![partition]);
    let group = OffsetFetchRequestGroup::default()
        .with_group_id(GroupId(owned(group)))
        .with_topics(Some(vec![topic]));
    let request = OffsetFetchRequest::default()
        .with_groups(vec![group])
        // While a transaction is about to commit an offset, neither the old nor the new one is the answer.
        .with_require_stable(true);
    let response: OffsetFetchResponse = call(address, ApiKey::OffsetFetch, 8, &request)?;
    for group in response.groups {
        if let Some(error) = group.error_code.err() {
            return Err(error.into());
        }
        for partition in group.topics.into_iter().flat_map(|topic| topic.partitions) {
            if let Some(error) = partition.error_code.err() {
                return Err(error.into());
            }
            if partition.committed_offset >= 0 {
                return Ok(Some(Committed {
                    offset: partition.committed_offset,
                    metadata: partition.metadata.unwrap_or_default().to_string(),
                }));
            }
        }
    }
    Ok(None)
}

/// The members of a group of the new protocol; `None` if it is none.
fn describe(address: SocketAddr, group: &str) -> Result<Option<Vec<Member>>, Failure> {
    let request = ConsumerGroupDescribeRequest::default()
        .with_group_ids(vec![GroupId(StrBytes::from_string(group.to_owned()))]);
    let response: ConsumerGroupDescribeResponse =
        call(address, ApiKey::ConsumerGroupDescribe, 0, &request)?;
    let mut members = Vec::new();
    for group in response.groups {
        match group.error_code.err() {
            None => {}
            Some(ResponseError::GroupIdNotFound) => return Ok(None),
            Some(error) => return Err(error.into()),
        }
        for member in group.members {
            let partitions = member.assignment.topic_partitions;
            members.push(Member {
                id: member.member_id.to_string(),
                client_id: member.client_id.to_string(),
                host: member.client_host.to_string(),
                partitions: flatten(
                    partitions.into_iter().map(|topic| (topic.topic_name.0, topic.partitions)),
                ),
            });
        }
    }
    members.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(Some(members))
}

fn describe_classic(address: SocketAddr, group: &str) -> Result<Vec<Member>, Failure> {
    let request = DescribeGroupsRequest::default()
        .with_groups(vec![GroupId(StrBytes::from_string(group.to_owned()))]);
    let response: DescribeGroupsResponse = call(address, ApiKey::DescribeGroups, 5, &request)?;
    let mut members = Vec::new();
    for group in response.groups {
        if let Some(error) = group.error_code.err() {
            return Err(error.into());
        }
        for member in group.members {
            members.push(Member {
                id: member.member_id.to_string(),
                client_id: member.client_id.to_string(),
                host: member.client_host.to_string(),
                partitions: assignment(member.member_assignment)?,
            });
        }
    }
    members.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(members)
}

/// What the leader of a classic group has assigned to a member; empty while the group has not settled.
fn assignment(mut bytes: Bytes) -> Result<Vec<(String, i32)>, Failure> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let malformed = |what: &dyn std::fmt::Display| {
        Failure::Lasting(format!("an assignment cannot be read: {what}"))
    };
    let version = bytes.try_get_i16().map_err(|error| malformed(&error))?;
    // Later versions only add to the end of what is read here.
    let assignment = ConsumerProtocolAssignment::decode(&mut bytes, version.clamp(0, 3))
        .map_err(|error| malformed(&error))?;
    Ok(flatten(
        assignment.assigned_partitions.into_iter().map(|topic| (topic.topic.0, topic.partitions)),
    ))
}

fn flatten(topics: impl Iterator<Item = (StrBytes, Vec<i32>)>) -> Vec<(String, i32)> {
    let mut all: Vec<(String, i32)> = topics
        .flat_map(|(topic, partitions)| {
            partitions.into_iter().map(move |partition| (topic.to_string(), partition))
        })
        .collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_are_read_and_garbage_is_an_error() {
        let mut bytes = vec![0, 1];
        bytes.extend([0, 0, 0, 1, 0, 1, b't', 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 3]);
        bytes.extend([0xff, 0xff, 0xff, 0xff]);
        let Ok(partitions) = assignment(Bytes::from(bytes.clone())) else { panic!("not read") };
        assert_eq!(partitions, [("t".to_owned(), 3), ("t".to_owned(), 7)]);
        for length in 1..bytes.len() {
            assert!(assignment(Bytes::from(bytes[..length].to_vec())).is_err());
        }
        assert!(assignment(Bytes::new()).is_ok_and(|none| none.is_empty()));
    }
}
