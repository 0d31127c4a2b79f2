//! What a running consumer tells about itself, and the report of a finished one.

/// Something that happened. Delivered on the poller's thread: the callback must be quick, since no
/// partition is served while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The group gave these partitions to this consumer.
    Assigned {
        /// Topic and partition.
        partitions: Vec<(String, i32)>,
    },
    /// These partitions were given up, after what was finished had been committed (or the budget
    /// for that had passed).
    Revoked {
        /// Topic and partition.
        partitions: Vec<(String, i32)>,
    },
    /// These partitions were taken away without asking (the membership expired). Nothing was
    /// committed for them.
    Lost {
        /// Topic and partition.
        partitions: Vec<(String, i32)>,
    },
    /// The broker acknowledged these offsets.
    Committed {
        /// One for each partition of the request.
        offsets: Vec<Committed>,
    },
    /// The broker did not take these offsets. They are sent again at the next interval if the
    /// partitions are still owned.
    CommitFailed {
        /// One for each refused partition.
        offsets: Vec<Committed>,
        /// The broker's, or the client's, error.
        reason: String,
    },
    /// Records that an earlier life of the group has finished above the committed offset are skipped
    /// when they are delivered.
    Resumed {
        /// Topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// The committed offset.
        offset: i64,
        /// Finished offsets above it; some may not exist.
        finished: u64,
    },
    /// The committed offset came with metadata that cannot be used: from another tool, damaged, or
    /// written for another offset. Everything from the offset on is handled; the next commit
    /// overwrites the metadata.
    MetadataIgnored {
        /// Topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// The committed offset.
        offset: i64,
        /// What is wrong with it.
        reason: String,
    },
    /// Something that a person should know and that the consumer goes on after.
    Warning {
        /// What, with topic, partition and offset where there are any.
        message: String,
    },
}

/// An offset of a commit request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Topic.
    pub topic: String,
    /// Partition.
    pub partition: i32,
    /// The next offset to read after a restart: every record below it is finished.
    pub offset: i64,
}

/// What a consumer did until it ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Records whose handling was finished and passed by a watermark.
    pub handled: u64,
    /// Commit requests that the broker acknowledged.
    pub commits: u64,
    /// Records that were delivered and skipped because an earlier life had finished them. They are
    /// not among `handled`.
    pub resumed: u64,
    /// Partitions whose stored metadata could not be used.
    pub metadata_ignored: u64,
    /// Commits of a partition that were sent again without metadata because the broker found it too
    /// large.
    pub metadata_refused: u64,
    /// Commits of a partition whose done-map was cut to fit.
    pub metadata_cut: u64,
    /// The partitions owned at the end.
    pub partitions: Vec<PartitionReport>,
}

/// Where one partition stood at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionReport {
    /// Topic.
    pub topic: String,
    /// Partition.
    pub partition: i32,
    /// The last acknowledged offset of this consumer, if it committed any.
    pub committed: Option<i64>,
    /// Records below the watermark, without `resumed`.
    pub finished: u64,
    /// Records skipped because an earlier life had finished them.
    pub resumed: u64,
    /// Admitted records at or above the watermark: they will be delivered again.
    pub unfinished: u64,
}
