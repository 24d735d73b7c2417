//! Tells the agent of this host, now and then, how much of its memory a guest has touched. An agent that is away is tried again
//! the next time, and disturbs nobody meanwhile.

use std::{io, path::PathBuf, sync::Arc};

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
    agent: PathBuf,
    /// The connection by which the guest's memory came, and later ones.
    client: Option<Client>,
    touched: Arc<Touched>,
    /// Nodes below this are local ones.
    first_pool_node: u32,
}

impl Statistics {
    /// Of a VM's memory, for the agent that it came from.
    pub fn new(vm: Name, agent: PathBuf, client: Client, layout: &Layout, touched: Arc<Touched>) -> Self {
        let local = layout.nodes.iter().filter(|node| !node.is_pool()).count();
        let first_pool_node = u32::try_from(local).expect("nodes are few");
        Self { vm, agent, client: Some(client), touched, first_pool_node }
    }

    /// Tells on a thread of its own, until the process ends.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(mut self, filters: &Filters) -> io::Result<()> {
        let tell_always = move || {
            loop {
                std::thread::sleep(TOUCHED_TOLD_EVERY.as_duration());
                let _ = self.tell(); // who misses it sees in the agent's metrics that it is away
            }
        };
        filters.spawn(Work::Statistics, "statistics".into(), tell_always).map(drop)
    }

    /// A connection that fails is of an agent that is gone; there may be another.
    fn tell(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let by_node = self.touched.by_node()?;
        let local: u64 = by_node.range(..self.first_pool_node).map(|(_, bytes)| bytes).sum();
        let pool: u64 = by_node.range(self.first_pool_node..).map(|(_, bytes)| bytes).sum();
        let tell = |client: &Client| client.touched(self.vm.as_str(), local, pool);
        if self.client.as_ref().is_some_and(|client| tell(client).is_ok()) {
            return Ok(());
        }
        self.client = None;
        let client = Client::connect(&self.agent)?;
        tell(&client)?;
        self.client = Some(client);
        Ok(())
    }
}
