//! Tells the agent of this host, now and then, how much of its memory a guest has touched, until the agent is gone: a confined
//! process connects to no other.

use std::{io, sync::Arc};

use host_memory::Client;
use units::{Name, limits::TOUCHED_TOLD_EVERY};

use crate::{
    confine::threads::{Filters, Work},
    layout::Layout,
    memory::touched::Touched,
};

/// Who tells whom of what.
#[derive(Debug)]
pub struct Statistics {
    vm: Name,
    /// The connection by which the guest's memory came.
    client: Client,
    touched: Arc<Touched>,
    /// Nodes below this are local ones.
    first_pool_node: u32,
}

impl Statistics {
    /// Of a VM's memory, for the agent that it came from.
    pub fn new(vm: Name, client: Client, layout: &Layout, touched: Arc<Touched>) -> Self {
        let local = layout.nodes.iter().filter(|node| !node.is_pool()).count();
        let first_pool_node = u32::try_from(local).expect("nodes are few");
        Self { vm, client, touched, first_pool_node }
    }

    /// Tells on a thread of its own, until the agent or this process ends.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(self, filters: &Filters) -> io::Result<()> {
        let tell_until_refused = move || {
            loop {
                std::thread::sleep(TOUCHED_TOLD_EVERY.as_duration());
                if self.tell().is_err() {
                    return; // whoever misses it sees in the agent's metrics that it is away
                }
            }
        };
        filters.spawn(Work::Statistics, "statistics".into(), tell_until_refused).map(drop)
    }

    fn tell(&self) -> Result<(), Box<dyn std::error::Error>> {
        let by_node = self.touched.by_node()?;
        let local: u64 = by_node.range(..self.first_pool_node).map(|(_, bytes)| bytes).sum();
        let pool: u64 = by_node.range(self.first_pool_node..).map(|(_, bytes)| bytes).sum();
        Ok(self.client.touched(self.vm.as_str(), local, pool)?)
    }
}
