//! Checks that the keys of a new rack do not mix with those of other programs or racks.

use std::path::PathBuf;

use ::etcd::messages::{RangeRequest, prefix_end};

use super::{Cluster, StoreError, keys::Keys};

/// Names of the keys and folders of a store. A folder ends with a slash.
const OWN_NAMES: [&str; 9] =
    ["leader", "managers/", "transfer", "head", "applied", "log/", "entry/", "chunk/", "emc/"];

impl Cluster {
    /// Checks that all keys with the prefix belong to a store, and that the prefix is not inside that of another store.
    ///
    /// # Errors
    /// [`StoreError::PrefixInUse`] or [`StoreError::Etcd`].
    pub fn check_prefix(&self) -> Result<(), StoreError> {
        let (cluster, keys) = (self.clone(), Keys::new(self.client.clone(), &self.prefix, None));
        self.block_on(async move {
            match cluster.find_other_key(&keys).await? {
                Some(key) => {
                    let key = PathBuf::from(String::from_utf8_lossy(&key).into_owned());
                    Err(StoreError::PrefixInUse { path: cluster.location(), key })
                }
                None => Ok(()),
            }
        })
    }

    async fn find_other_key(&self, keys: &Keys) -> Result<Option<Vec<u8>>, StoreError> {
        let prefix = format!("{}/", self.prefix).into_bytes();
        let mut start = prefix.clone();
        // Each step skips the keys with one name, so that the number of steps is limited by the names.
        loop {
            let end = prefix_end(&prefix);
            let Some(key) = first_key(keys, start, end).await? else { break };
            let name = &key[prefix.len()..];
            let own = OWN_NAMES.iter().find(|own| match own.ends_with('/') {
                true => name.starts_with(own.as_bytes()),
                false => name == own.as_bytes(),
            });
            let Some(own) = own else { return Ok(Some(key)) };
            start = match own.ends_with('/') {
                true => prefix_end(&[&prefix, own.as_bytes()].concat()),
                false => [&key[..], &[0]].concat(),
            };
        }
        let ancestors = self.prefix.match_indices('/').map(|(at, _)| &self.prefix[..at]);
        for ancestor in ancestors.filter(|ancestor| !ancestor.is_empty()) {
            let head = format!("{ancestor}/head").into_bytes();
            if let Some(key) = first_key(keys, head, Vec::new()).await? {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }
}

/// Returns the first key of a range; with an empty `range_end`, the key itself if it exists.
async fn first_key(keys: &Keys, key: Vec<u8>, range_end: Vec<u8>) -> Result<Option<Vec<u8>>, StoreError> {
    let request = RangeRequest { key, range_end, limit: 1, keys_only: true, ..RangeRequest::default() };
    Ok(keys.read_page(request).await?.kvs.into_iter().next().map(|entry| entry.key))
}
