//! Messages of etcd, generated from `proto/etcd.proto`, and functions that create common ones.

pub use generated::*;

#[allow(missing_docs, missing_debug_implementations, clippy::all, clippy::pedantic)]
mod generated {
    tonic::include_proto!("etcdserverpb");
}

/// Returns the end of the range of all keys with a prefix: the smallest key that is larger than all of them.
/// Returns the byte 0, which stands for the largest key, if `prefix` is empty or contains only the byte 255.
pub fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let end = prefix.iter().rposition(|byte| *byte < u8::MAX).map(|last| {
        let mut end = prefix[..=last].to_vec();
        end[last] += 1;
        end
    });
    end.unwrap_or_else(|| vec![0])
}

/// Returns the operation that writes an entry.
pub fn put(key: Vec<u8>, value: Vec<u8>) -> RequestOp {
    put_with_lease(key, value, 0)
}

/// Returns the operation that writes an entry, which is deleted when the lease ends. Lease 0 stands for none.
pub fn put_with_lease(key: Vec<u8>, value: Vec<u8>, lease: i64) -> RequestOp {
    RequestOp { request: Some(request_op::Request::RequestPut(PutRequest { key, value, lease })) }
}

/// Returns the operation that reads one entry.
pub fn get(key: Vec<u8>) -> RequestOp {
    let range = RangeRequest { key, ..RangeRequest::default() };
    RequestOp { request: Some(request_op::Request::RequestRange(range)) }
}

/// Returns the operation that deletes one entry.
pub fn delete(key: Vec<u8>) -> RequestOp {
    delete_range(key, Vec::new())
}

/// Returns the operation that deletes the entries from `key` to before `range_end`.
pub fn delete_range(key: Vec<u8>, range_end: Vec<u8>) -> RequestOp {
    let range = DeleteRangeRequest { key, range_end };
    RequestOp { request: Some(request_op::Request::RequestDeleteRange(range)) }
}

/// Returns the condition that an entry was created in a revision. Revision 0 means that the entry does not exist.
pub fn is_created_in(key: Vec<u8>, revision: i64) -> Compare {
    compare(key, compare::CompareTarget::Create, compare::TargetUnion::CreateRevision(revision))
}

/// Returns the condition that an entry was last written in a revision. Revision 0 means that the entry does not
/// exist.
pub fn is_written_in(key: Vec<u8>, revision: i64) -> Compare {
    compare(key, compare::CompareTarget::Mod, compare::TargetUnion::ModRevision(revision))
}

fn compare(key: Vec<u8>, target: compare::CompareTarget, value: compare::TargetUnion) -> Compare {
    Compare {
        result: compare::CompareResult::Equal.into(),
        target: target.into(),
        key,
        target_union: Some(value),
    }
}

impl TxnResponse {
    /// Returns the revision of etcd after the transaction.
    pub fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }

    /// Returns the entries that the operation at `index` read; empty if it read none.
    pub fn entries(&self, index: usize) -> &[KeyValue] {
        match self.responses.get(index).and_then(|response| response.response.as_ref()) {
            Some(response_op::Response::ResponseRange(range)) => &range.kvs,
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_a_prefix_is_the_next_key_without_it() {
        assert_eq!(prefix_end(b"a/"), b"a0");
        assert_eq!(prefix_end(&[1, 255, 255]), [2]);
        assert_eq!(prefix_end(&[255]), [0]);
        assert_eq!(prefix_end(&[]), [0]);
    }
}
