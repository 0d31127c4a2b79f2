//! A TCP proxy that can be cut, stalled and slowed down.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The largest piece that travels at once.
const PIECE: usize = 64 * 1024;

/// How many pieces one direction of a connection holds while they are delayed or stalled.
const PIECES: usize = 64;

/// A TCP proxy on 127.0.0.1 in front of one address.
///
/// Dropping it closes all its connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closing: bool,
    cut: bool,
    stalled: bool,
    delay: Duration,
    next: u64,
    connections: HashMap<u64, Arc<Connection>>,
}

#[derive(Debug)]
struct Connection {
    number: u64,
    client: TcpStream,
    server: TcpStream,
    closed: AtomicBool,
    /// How many of the two directions still carry something.
    open: AtomicU8,
}

impl Connection {
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // An error says that the peer was faster.
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

impl Proxy {
    /// Starts a proxy on a free port. Nothing has to listen on `target` yet: a connection that finds nobody there is
    /// closed.
    ///
    /// # Errors
    ///
    /// If the operating system refuses a listening socket or a thread.
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { target, state: Mutex::default(), changed: Condvar::new() });
        let acceptor =
            std::thread::Builder::new().name(format!("proxy-{}", address.port())).spawn({
                let shared = Arc::clone(&shared);
                move || accept(&listener, &shared)
            })?;
        Ok(Self { address, shared, acceptor: Some(acceptor) })
    }

    /// Where the proxy listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes all connections, and from now on each new one as soon as it is accepted, until [`heal`](Self::heal).
    pub fn cut(&self) {
        let mut state = self.shared.state();
        state.cut = true;
        for (_, connection) in state.connections.drain() {
            connection.close();
        }
        self.shared.changed.notify_all();
    }

    /// Lets nothing through from now on, until [`heal`](Self::heal), while all connections stay open and new ones are
    /// accepted: what a network does that loses everything. What was under way travels after the healing.
    pub fn stall(&self) {
        self.shared.state().stalled = true;
    }

    /// Ends [`cut`](Self::cut) and [`stall`](Self::stall). A delay stays.
    pub fn heal(&self) {
        let mut state = self.shared.state();
        state.cut = false;
        state.stalled = false;
        self.shared.changed.notify_all();
    }

    /// Has everything that arrives from now on travel this much longer, in each direction: a round trip takes twice
    /// the delay longer. Bandwidth stays, up to 4 MiB under way in each direction of a connection. Zero ends it.
    pub fn delay(&self, delay: Duration) {
        self.shared.state().delay = delay;
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.shared.state().connections.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state();
            state.closing = true;
            state.cut = true;
            for (_, connection) in state.connections.drain() {
                connection.close();
            }
            self.shared.changed.notify_all();
        }
        // Wakes the acceptor. If even this fails, the thread is left to itself rather than waited for.
        if TcpStream::connect(self.address).is_ok()
            && let Some(acceptor) = self.acceptor.take()
        {
            // A panic of the acceptor has been printed by then.
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let accepted = listener.accept();
        let state = shared.state();
        if state.closing {
            return;
        }
        let refused = state.cut;
        drop(state);
        match accepted {
            Ok((client, _)) if !refused => {
                // A thread of its own: a target that does not answer must not hold up other connections.
                let shared = Arc::clone(shared);
                // Without a thread or a target the client sees its connection closed.
                let _ = std::thread::Builder::new()
                    .name("proxy-connect".into())
                    .spawn(move || connect(client, &shared));
            }
            Ok(_) => {}
            // For example out of file descriptors: not a reason to give up, nor to spin.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Connects a client with the target and starts the two directions.
fn connect(client: TcpStream, shared: &Arc<Shared>) {
    // An error anywhere here closes what has been opened; the client sees that, and there is nobody else to tell.
    let _ = (|| -> io::Result<()> {
        let server = TcpStream::connect_timeout(&shared.target, Duration::from_secs(10))?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (client_reader, server_reader) = (client.try_clone()?, server.try_clone()?);
        let (client_writer, server_writer) = (client.try_clone()?, server.try_clone()?);
        let connection = {
            let mut state = shared.state();
            if state.cut {
                return Ok(());
            }
            state.next += 1;
            let connection = Arc::new(Connection {
                number: state.next,
                client,
                server,
                closed: AtomicBool::new(false),
                open: AtomicU8::new(2),
            });
            state.connections.insert(connection.number, Arc::clone(&connection));
            connection
        };
        let started = direction(client_reader, server_writer, shared, &connection)
            .and_then(|()| direction(server_reader, client_writer, shared, &connection));
        if started.is_err() {
            connection.close();
            shared.state().connections.remove(&connection.number);
        }
        started
    })();
}

type Piece = (Instant, Vec<u8>);

fn direction(
    from: TcpStream,
    to: TcpStream,
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
) -> io::Result<()> {
    let (sender, receiver) = sync_channel(PIECES);
    std::thread::Builder::new().name("proxy-read".into()).spawn({
        let shared = Arc::clone(shared);
        move || read(from, &sender, &shared)
    })?;
    std::thread::Builder::new().name("proxy-write".into()).spawn({
        let shared = Arc::clone(shared);
        let connection = Arc::clone(connection);
        move || {
            if write(to, &receiver, &shared, &connection).is_err() {
                connection.close();
            }
            if connection.open.fetch_sub(1, Ordering::AcqRel) == 1 {
                shared.state().connections.remove(&connection.number);
            }
        }
    })?;
    Ok(())
}

fn read(mut from: TcpStream, sender: &SyncSender<Piece>, shared: &Shared) {
    let mut buffer = vec![0; PIECE];
    loop {
        let length = match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        let due = Instant::now() + shared.state().delay;
        if sender.send((due, buffer[..length].to_vec())).is_err() {
            return;
        }
    }
}

fn write(
    mut to: TcpStream,
    receiver: &Receiver<Piece>,
    shared: &Shared,
    connection: &Connection,
) -> io::Result<()> {
    while let Ok((due, bytes)) = receiver.recv() {
        hold(due, shared, connection);
        if connection.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        to.write_all(&bytes)?;
    }
    // The sender is gone: the other end has finished writing, which the peer is told at the same point of the stream.
    hold(Instant::now(), shared, connection);
    match to.shutdown(Shutdown::Write) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        other => other,
    }
}

/// Waits until `due`, and on for as long as the proxy is stalled; returns at once when the connection is closed.
fn hold(due: Instant, shared: &Shared, connection: &Connection) {
    let mut state = shared.state();
    while !connection.closed.load(Ordering::Acquire) {
        let now = Instant::now();
        if state.stalled {
            state = shared.changed.wait(state).unwrap_or_else(|poison| poison.into_inner());
        } else if now < due {
            state = shared
                .changed
                .wait_timeout(state, due - now)
                .unwrap_or_else(|poison| poison.into_inner())
                .0;
        } else {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends back what it gets.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut reader = stream.unwrap();
                std::thread::spawn(move || {
                    let mut writer = reader.try_clone().unwrap();
                    // Ends with an error when the connection is cut.
                    let _ = io::copy(&mut reader, &mut writer);
                    let _ = writer.shutdown(Shutdown::Write);
                });
            }
        });
        address
    }

    fn client(proxy: &Proxy) -> TcpStream {
        let stream = TcpStream::connect(proxy.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream
    }

    fn round_trip(stream: &mut TcpStream, text: &[u8]) -> io::Result<()> {
        stream.write_all(text)?;
        let mut back = vec![0; text.len()];
        stream.read_exact(&mut back)?;
        assert_eq!(back, text);
        Ok(())
    }

    #[test]
    fn everything_arrives_and_the_end_too() {
        let proxy = Proxy::start(echo()).unwrap();
        let mut stream = client(&proxy);
        let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
        let writer = std::thread::spawn({
            let (mut stream, sent) = (stream.try_clone().unwrap(), sent.clone());
            move || {
                stream.write_all(&sent).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            }
        });
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        writer.join().unwrap();
        assert!(got == sent);
        let deadline = Instant::now() + Duration::from_secs(10);
        while proxy.connections() > 0 {
            assert!(Instant::now() < deadline, "the connection stays registered");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_cut_closes_and_refuses_until_healed() {
        let proxy = Proxy::start(echo()).unwrap();
        let mut old = client(&proxy);
        round_trip(&mut old, b"before").unwrap();
        assert_eq!(proxy.connections(), 1);
        proxy.cut();
        assert_eq!(proxy.connections(), 0);
        assert!(round_trip(&mut old, b"after").is_err());
        assert!(round_trip(&mut client(&proxy), b"new").is_err());
        proxy.heal();
        round_trip(&mut client(&proxy), b"healed").unwrap();
    }

    #[test]
    fn a_stall_keeps_the_connection_and_loses_nothing() {
        let proxy = Proxy::start(echo()).unwrap();
        let mut stream = client(&proxy);
        round_trip(&mut stream, b"before").unwrap();
        proxy.stall();
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        stream.write_all(b"held").unwrap();
        let mut back = [0; 4];
        let error = stream.read_exact(&mut back).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        proxy.heal();
        stream.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"held");
    }

    #[test]
    fn a_stalled_connection_can_be_cut() {
        let proxy = Proxy::start(echo()).unwrap();
        let mut stream = client(&proxy);
        round_trip(&mut stream, b"before").unwrap();
        proxy.stall();
        stream.write_all(b"lost").unwrap();
        proxy.cut();
        let mut rest = Vec::new();
        // Closed, in order or by a reset.
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }

    #[test]
    fn a_delay_counts_once_each_way_and_does_not_add_up() {
        let proxy = Proxy::start(echo()).unwrap();
        let mut stream = client(&proxy);
        round_trip(&mut stream, b"warm").unwrap();
        let delay = Duration::from_millis(100);
        proxy.delay(delay);
        let start = Instant::now();
        // More than one piece: the pieces must be delayed side by side, not one after the other.
        let writer = std::thread::spawn({
            let mut stream = stream.try_clone().unwrap();
            move || stream.write_all(&vec![7; 20 * PIECE]).unwrap()
        });
        let mut back = vec![0; 20 * PIECE];
        stream.read_exact(&mut back).unwrap();
        writer.join().unwrap();
        let took = start.elapsed();
        assert!(took >= 2 * delay, "{took:?}");
        assert!(took < 20 * delay, "{took:?}");
    }

    #[test]
    fn nobody_behind_the_proxy_closes_the_connection() {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let target = free.local_addr().unwrap();
        drop(free);
        let proxy = Proxy::start(target).unwrap();
        assert!(round_trip(&mut client(&proxy), b"hello").is_err());
    }

    #[test]
    fn dropping_the_proxy_closes_connections() {
        let proxy = Proxy::start(echo()).unwrap();
        let mut stream = client(&proxy);
        let address = proxy.address();
        round_trip(&mut stream, b"before").unwrap();
        drop(proxy);
        assert!(round_trip(&mut stream, b"after").is_err());
        assert!(TcpStream::connect(address).is_err());
    }
}
