//! Ports for the listeners of brokers.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};

/// A port on 127.0.0.1 that was free when it was picked.
///
/// On Linux it also stays ours: a socket is kept bound to it without listening, which keeps the kernel from giving the
/// port to anyone who asks for any port, as a client's end of a connection or otherwise, even while the broker is
/// down. The broker can bind it all the same, because Java sets `SO_REUSEADDR` on listening sockets, as is done here.
/// Elsewhere two such sockets exclude each other, and the port is only picked.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    _reservation: Option<Socket>,
}

impl Port {
    pub(crate) fn pick() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let number = socket
            .local_addr()?
            .as_socket()
            .map(|address| address.port())
            .ok_or_else(|| io::Error::other("a TCP socket without a port"))?;
        Ok(Self { number, _reservation: cfg!(target_os = "linux").then_some(socket) })
    }

    /// A port that may be taken.
    #[cfg(test)]
    pub(crate) fn unchecked(number: u16) -> Self {
        Self { number, _reservation: None }
    }

    /// `127.0.0.1:PORT`
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_picked_port_can_be_listened_on_while_it_is_held() {
        let port = Port::pick().unwrap();
        assert!(TcpStream::connect(port.address()).is_err());
        // std sets SO_REUSEADDR on listeners, as Java does.
        let listener = TcpListener::bind(port.address()).unwrap();
        assert!(TcpStream::connect(port.address()).is_ok());
        drop(listener);
        TcpListener::bind(port.address()).unwrap();
    }

    #[test]
    fn held_ports_are_distinct() {
        let ports: Vec<Port> = (0..100).map(|_| Port::pick().unwrap()).collect();
        let numbers: HashSet<u16> = ports.iter().map(|port| port.number).collect();
        assert_eq!(numbers.len(), ports.len());
    }
}
