//! Configs of topics.
//!
//! The binding of librdkafka's requests for them ignores the errors in the answers, and its request to alter configs
//! replaces all of them.

use std::net::SocketAddr;

use kafka_protocol::error::ParseResponseErrorCode;
use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::incremental_alter_configs_request::{
    AlterConfigsResource, AlterableConfig,
};
use kafka_protocol::messages::{
    ApiKey, DescribeConfigsRequest, DescribeConfigsResponse, IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
};
use kafka_protocol::protocol::StrBytes;

use crate::cluster::Cluster;
use crate::error::Error;
use crate::wire::{Failure, call};

/// The protocol's number for topics among the things that have configs.
const TOPIC: i8 = 2;

impl Cluster {
    /// Sets configs of a topic; those not named stay as they are. Waits until every reachable broker knows them.
    ///
    /// # Errors
    ///
    /// If the brokers refuse, for example because there is no such topic or config.
    pub fn alter_topic_config(&self, topic: &str, configs: &[(&str, &str)]) -> Result<(), Error> {
        let request = format!("alter the configs of topic `{topic}`");
        self.ask(&request, |address| alter(address, topic, configs))?;
        // The controller has them; each broker gets them a little later.
        self.wait_for_all(&format!("the configs of topic `{topic}`"), |address| {
            let described = describe(address, topic)?;
            Ok(configs.iter().all(|(name, value)| {
                described.iter().any(|(found, set)| found == name && set.as_deref() == Some(*value))
            }))
        })
    }

    /// The value of a topic config, set or default; `None` if there is no such config.
    ///
    /// # Errors
    ///
    /// If the brokers refuse, for example because there is no such topic.
    pub fn topic_config(&self, topic: &str, name: &str) -> Result<Option<String>, Error> {
        let request = format!("describe the configs of topic `{topic}`");
        let described = self.ask(&request, |address| describe(address, topic))?;
        let found = described.into_iter().find(|(found, _)| found == name);
        Ok(found.and_then(|(_, value)| value))
    }
}

fn owned(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

fn alter(address: SocketAddr, topic: &str, configs: &[(&str, &str)]) -> Result<(), Failure> {
    let configs = configs
        .iter()
        .map(|(name, value)| {
            // Operation 0, the default: set.
            AlterableConfig::default().with_name(owned(name)).with_value(Some(owned(value)))
        })
        .collect();
    let request = IncrementalAlterConfigsRequest::default().with_resources(vec![
        AlterConfigsResource::default()
            .with_resource_type(TOPIC)
            .with_resource_name(owned(topic))
            .with_configs(configs),
    ]);
    let response: IncrementalAlterConfigsResponse =
        call(address, ApiKey::IncrementalAlterConfigs, 1, &request)?;
    for resource in response.responses {
        if let Some(error) = resource.error_code.err() {
            return Err(Failure::told(error, resource.error_message));
        }
    }
    Ok(())
}

fn describe(address: SocketAddr, topic: &str) -> Result<Vec<(String, Option<String>)>, Failure> {
    let request = DescribeConfigsRequest::default().with_resources(vec![
        DescribeConfigsResource::default()
            .with_resource_type(TOPIC)
            .with_resource_name(owned(topic))
            // No list of names: all of them.
            .with_configuration_keys(None),
    ]);
    let response: DescribeConfigsResponse = call(address, ApiKey::DescribeConfigs, 4, &request)?;
    let mut configs = Vec::new();
    for result in response.results {
        if let Some(error) = result.error_code.err() {
            return Err(Failure::told(error, result.error_message));
        }
        configs.extend(result.configs.into_iter().map(|config| {
            let value = config.value.map(|value| value.to_string());
            (config.name.to_string(), value)
        }));
    }
    Ok(configs)
}
