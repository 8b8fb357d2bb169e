//! A server that is reached by sockets.

use std::io;
use std::sync::Arc;

use dray_core::Fut;

use crate::{Address, Connect, Connection};

/// Connects to an address by sockets.
#[derive(Clone, Debug)]
pub struct Sockets(pub Address);

impl Connect for Sockets {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(async {
            let connection = crate::connect(&self.0).await?;
            Ok(Arc::new(connection) as Arc<dyn Connection>)
        })
    }

    fn target(&self) -> String {
        self.0.to_string()
    }
}
