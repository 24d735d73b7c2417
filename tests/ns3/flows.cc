// Witness of the flow model in sim::eviction: sends the same flows as packets with ns-3 3.37, DCTCP and switches
// with eight queues per port. Reads the network and the flows from stdin, one record per line:
//
//   weights W0 W1 W2 W3 W4 W5 W6 W7
//   link NODE NODE BITS_PER_S DELAY_NS       (duplex)
//   flow START_NS BYTES QUEUE NODE NODE ...  (nodes of the route, from source to sink)
//
// Prints the completion time of each flow in nanoseconds, one per line, in the order of the input: the time from
// the start until the sink has the last byte. Connections are established before the first start. Queues are long
// enough that no packet is lost.

#include <ns3/core-module.h>
#include <ns3/internet-module.h>
#include <ns3/network-module.h>
#include <ns3/point-to-point-module.h>
#include <ns3/traffic-control-module.h>

#include <array>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

using namespace ns3;

namespace
{

constexpr std::size_t QUEUES = 8;
// Bytes of the largest IP packet.
constexpr uint32_t PACKET_BYTES = 1500;
// Payload of a packet: without 20 bytes for IP and 32 for TCP with timestamps.
constexpr uint32_t PAYLOAD_BYTES = 1448;
// Length of a queue from which packets are marked, in seconds at the rate of the link: 65 packets at 10 Gbit/s
// (Alizadeh et al., Data Center TCP, section 3.5).
constexpr double MARKING_THRESHOLD_S = 65 * PACKET_BYTES * 8 / 10e9;
// Connections are established during this time before the first start.
const Time SETUP = Seconds(1);
// Bound of the simulated time after which flows count as stuck.
const Time LIMIT = Seconds(1000);

[[noreturn]] void Fail(const std::string& message)
{
    std::cerr << "error: " << message << std::endl;
    std::exit(1);
}

// Returns the source port of a TCP packet. It is 8 i + q for the data of flow i in queue q, and 8 i for its
// acknowledgements, which use queue 0. A socket of ns-3 3.37 that sets the TOS field cannot use ECN.
uint16_t SourcePort(const Packet& packet)
{
    std::array<uint8_t, 2> port{};
    packet.CopyData(port.data(), port.size());
    return port[0] << 8 | port[1];
}

// Port of a link with eight queues, served by deficit round robin. The quantum of a queue is its weight in packets.
class WeightedQueues : public QueueDisc
{
  public:
    static TypeId GetTypeId()
    {
        static TypeId id = TypeId("WeightedQueues").SetParent<QueueDisc>().AddConstructor<WeightedQueues>();
        return id;
    }

    WeightedQueues()
        : QueueDisc(QueueDiscSizePolicy::NO_LIMITS)
    {
    }

    void Configure(const std::array<double, QUEUES>& weights, double bitsPerSecond)
    {
        for (std::size_t queue = 0; queue < QUEUES; queue++)
        {
            m_quantum[queue] = weights[queue] * PACKET_BYTES;
        }
        m_threshold = bitsPerSecond / 8 * MARKING_THRESHOLD_S;
    }

  private:
    bool DoEnqueue(Ptr<QueueDiscItem> item) override
    {
        auto queue = GetInternalQueue(SourcePort(*item->GetPacket()) % QUEUES);
        if (queue->GetNBytes() > m_threshold)
        {
            Mark(item, "threshold");
        }
        return queue->Enqueue(item);
    }

    Ptr<QueueDiscItem> DoDequeue() override
    {
        if (GetNPackets() == 0)
        {
            return nullptr;
        }
        while (true)
        {
            auto queue = GetInternalQueue(m_served);
            if (auto item = queue->Peek(); item && item->GetSize() <= m_deficit)
            {
                m_deficit -= item->GetSize();
                return queue->Dequeue();
            }
            // A queue keeps its deficit for the next round only while it has packets.
            m_deficits[m_served] = queue->IsEmpty() ? 0 : m_deficit;
            m_served = (m_served + 1) % QUEUES;
            m_deficit = m_deficits[m_served] + m_quantum[m_served];
        }
    }

    bool CheckConfig() override
    {
        while (GetNInternalQueues() < QUEUES)
        {
            auto queue = CreateObject<DropTailQueue<QueueDiscItem>>();
            queue->SetMaxSize(QueueSize(QueueSizeUnit::PACKETS, UINT32_MAX));
            AddInternalQueue(queue);
        }
        return true;
    }

    void InitializeParams() override
    {
    }

    std::array<double, QUEUES> m_quantum{};
    std::array<double, QUEUES> m_deficits{};
    double m_threshold = 0;
    std::size_t m_served = 0;
    double m_deficit = 0;
};

// Routes packets by destination and flow, so that each flow has its own route.
class FlowRouting : public Ipv4RoutingProtocol
{
  public:
    void Add(Ipv4Address destination, std::size_t flow, uint32_t interface)
    {
        m_interfaces[{destination.Get(), flow}] = interface;
    }

    Ptr<Ipv4Route> RouteOutput(Ptr<Packet> packet,
                               const Ipv4Header& header,
                               Ptr<NetDevice>,
                               Socket::SocketErrno& error) override
    {
        error = Socket::ERROR_NOTERROR;
        // A socket that selects its address has no packet. All interfaces of a node have the same address.
        return MakeRoute(header, packet ? FindInterface(*packet, header) : 1);
    }

    bool RouteInput(Ptr<const Packet> packet,
                    const Ipv4Header& header,
                    Ptr<const NetDevice> device,
                    UnicastForwardCallback forward,
                    MulticastForwardCallback,
                    LocalDeliverCallback deliver,
                    ErrorCallback) override
    {
        auto input = m_ip->GetInterfaceForDevice(device);
        if (header.GetDestination() == m_ip->GetAddress(input, 0).GetLocal())
        {
            deliver(packet, header, input);
        }
        else
        {
            forward(MakeRoute(header, FindInterface(*packet, header)), packet, header);
        }
        return true;
    }

    void SetIpv4(Ptr<Ipv4> ip) override
    {
        m_ip = ip;
    }

    void NotifyInterfaceUp(uint32_t) override
    {
    }

    void NotifyInterfaceDown(uint32_t) override
    {
    }

    void NotifyAddAddress(uint32_t, Ipv4InterfaceAddress) override
    {
    }

    void NotifyRemoveAddress(uint32_t, Ipv4InterfaceAddress) override
    {
    }

    void PrintRoutingTable(Ptr<OutputStreamWrapper>, Time::Unit) const override
    {
    }

  private:
    uint32_t FindInterface(const Packet& packet, const Ipv4Header& header) const
    {
        return m_interfaces.at({header.GetDestination().Get(), SourcePort(packet) / QUEUES});
    }

    Ptr<Ipv4Route> MakeRoute(const Ipv4Header& header, uint32_t interface) const
    {
        auto route = Create<Ipv4Route>();
        route->SetDestination(header.GetDestination());
        route->SetGateway(header.GetDestination()); // a link has one other end
        route->SetSource(m_ip->GetAddress(interface, 0).GetLocal());
        route->SetOutputDevice(m_ip->GetNetDevice(interface));
        return route;
    }

    Ptr<Ipv4> m_ip;
    // Interfaces by destination and flow.
    std::map<std::pair<uint32_t, std::size_t>, uint32_t> m_interfaces;
};

// Flow from the first to the last node of its route. Its sink records the completion time.
class Transfer : public SimpleRefCount<Transfer>
{
  public:
    Transfer(Time start, uint64_t bytes, unsigned queue)
        : m_start(SETUP + start),
          m_bytes(bytes),
          m_queue(queue)
    {
    }

    void Connect(Ptr<Node> from, Ptr<Node> to, Ipv4Address sink, std::size_t index)
    {
        uint16_t port = index * QUEUES;
        m_listener = Socket::CreateSocket(to, TcpSocketFactory::GetTypeId());
        m_listener->Bind(InetSocketAddress(sink, port));
        m_listener->Listen();
        m_listener->SetAcceptCallback(MakeNullCallback<bool, Ptr<Socket>, const Address&>(),
                                      MakeCallback(&Transfer::Accept, this));
        m_sender = Socket::CreateSocket(from, TcpSocketFactory::GetTypeId());
        m_sender->Bind(InetSocketAddress(Ipv4Address::GetAny(), port + m_queue));
        InetSocketAddress peer(sink, port);
        Simulator::Schedule(Seconds(0), [this, peer] { m_sender->Connect(peer); });
        Simulator::Schedule(m_start, &Transfer::Start, this);
    }

    bool IsComplete() const
    {
        return m_received == m_bytes;
    }

    Time CompletionTime() const
    {
        return m_end - m_start;
    }

  private:
    void Accept(Ptr<Socket> socket, const Address&)
    {
        socket->SetRecvCallback(MakeCallback(&Transfer::Receive, this));
        m_receiver = socket;
    }

    void Start()
    {
        m_sender->SetSendCallback(MakeCallback(&Transfer::Send, this));
        Send(m_sender, 0);
    }

    void Send(Ptr<Socket> socket, uint32_t)
    {
        while (m_sent < m_bytes)
        {
            auto size = std::min<uint64_t>(m_bytes - m_sent, 32 * PAYLOAD_BYTES);
            if (socket->Send(Create<Packet>(size)) < 0)
            {
                return; // the send buffer is full
            }
            m_sent += size;
        }
    }

    void Receive(Ptr<Socket> socket)
    {
        while (auto packet = socket->Recv())
        {
            m_received += packet->GetSize();
            m_end = Simulator::Now();
        }
    }

    Time m_start;
    Time m_end;
    uint64_t m_bytes;
    uint64_t m_sent = 0;
    uint64_t m_received = 0;
    unsigned m_queue;
    Ptr<Socket> m_listener;
    Ptr<Socket> m_sender;
    Ptr<Socket> m_receiver;
};

// Network and flows of the input.
class Witness
{
  public:
    void Read(std::istream& input)
    {
        std::string line;
        while (std::getline(input, line))
        {
            std::istringstream fields(line);
            std::string kind;
            fields >> kind;
            if (kind == "weights")
            {
                ReadWeights(fields);
            }
            else if (kind == "link")
            {
                ReadLink(fields);
            }
            else if (kind == "flow")
            {
                ReadFlow(fields, line);
            }
            else
            {
                Fail("unknown record: " + line);
            }
        }
        if (m_flows.empty())
        {
            Fail("no flow");
        }
    }

    void Run()
    {
        Simulator::Stop(SETUP + LIMIT);
        Simulator::Run();
        for (const auto& flow : m_flows)
        {
            if (!flow->IsComplete())
            {
                Fail("a flow is not complete after " + std::to_string(LIMIT.GetSeconds()) + " s");
            }
            std::cout << flow->CompletionTime().GetNanoSeconds() << '\n';
        }
        Simulator::Destroy();
    }

  private:
    Ptr<Node> FindOrCreate(unsigned index)
    {
        auto& node = m_nodes[index];
        if (!node)
        {
            node = CreateObject<Node>();
            InternetStackHelper internet;
            internet.SetIpv6StackInstall(false);
            internet.Install(node);
            node->GetObject<Ipv4>()->SetRoutingProtocol(CreateObject<FlowRouting>());
        }
        return node;
    }

    void ReadWeights(std::istringstream& fields)
    {
        for (double& weight : m_weights)
        {
            if (!(fields >> weight) || weight < 1)
            {
                Fail("invalid weights");
            }
        }
    }

    void ReadLink(std::istringstream& fields)
    {
        if (m_weights[0] == 0)
        {
            Fail("link before weights");
        }
        unsigned from = 0;
        unsigned to = 0;
        double bitsPerSecond = 0;
        int64_t delayNs = 0;
        if (!(fields >> from >> to >> bitsPerSecond >> delayNs) || bitsPerSecond <= 0 || delayNs < 0)
        {
            Fail("invalid link");
        }
        PointToPointHelper link;
        // The queues of the port hold all packets but the next one.
        link.SetQueue("ns3::DropTailQueue<Packet>", "MaxSize", StringValue("1p"));
        link.SetDeviceAttribute("DataRate", DataRateValue(DataRate(static_cast<uint64_t>(bitsPerSecond))));
        link.SetDeviceAttribute("Mtu", UintegerValue(PACKET_BYTES));
        link.SetChannelAttribute("Delay", TimeValue(NanoSeconds(delayNs)));
        auto devices = link.Install(FindOrCreate(from), FindOrCreate(to));
        for (auto device : {devices.Get(0), devices.Get(1)})
        {
            auto queues = CreateObject<WeightedQueues>();
            queues->Configure(m_weights, bitsPerSecond);
            auto node = device->GetNode();
            node->GetObject<TrafficControlLayer>()->SetRootQueueDiscOnDevice(device, queues);
            auto ip = node->GetObject<Ipv4>();
            auto interface = ip->AddInterface(device);
            ip->AddAddress(interface, Ipv4InterfaceAddress(Address(node), Ipv4Mask::GetOnes()));
            ip->SetUp(interface);
            auto other = device == devices.Get(0) ? devices.Get(1) : devices.Get(0);
            m_interfaces[{node->GetId(), other->GetNode()->GetId()}] = interface;
        }
    }

    void ReadFlow(std::istringstream& fields, const std::string& line)
    {
        int64_t startNs = 0;
        uint64_t bytes = 0;
        unsigned queue = 0;
        if (!(fields >> startNs >> bytes >> queue) || startNs < 0 || bytes == 0 || queue >= QUEUES)
        {
            Fail("invalid flow: " + line);
        }
        std::vector<Ptr<Node>> route;
        for (unsigned node = 0; fields >> node;)
        {
            if (!m_nodes.count(node))
            {
                Fail("flow over an unknown node: " + line);
            }
            route.push_back(m_nodes[node]);
        }
        if (!fields.eof() || route.size() < 2)
        {
            Fail("invalid route: " + line);
        }
        auto source = Address(route.front());
        auto sink = Address(route.back());
        auto index = m_flows.size() + 1;
        if (index * QUEUES + QUEUES > UINT16_MAX)
        {
            Fail("too many flows");
        }
        for (std::size_t hop = 0; hop + 1 < route.size(); hop++)
        {
            AddRoute(route[hop], route[hop + 1], sink, index);
            AddRoute(route[hop + 1], route[hop], source, index);
        }
        auto flow = Create<Transfer>(NanoSeconds(startNs), bytes, queue);
        flow->Connect(route.front(), route.back(), sink, index);
        m_flows.push_back(flow);
    }

    void AddRoute(Ptr<Node> node, Ptr<Node> next, Ipv4Address destination, std::size_t index)
    {
        auto routing = node->GetObject<Ipv4>()->GetRoutingProtocol();
        DynamicCast<FlowRouting>(routing)->Add(destination, index, Interface(node, next));
    }

    uint32_t Interface(Ptr<Node> node, Ptr<Node> next)
    {
        auto found = m_interfaces.find({node->GetId(), next->GetId()});
        if (found == m_interfaces.end())
        {
            Fail("flow between nodes without a link");
        }
        return found->second;
    }

    static Ipv4Address Address(Ptr<Node> node)
    {
        return Ipv4Address(0x0a000001 + node->GetId()); // from 10.0.0.1
    }

    std::array<double, QUEUES> m_weights{};
    std::map<unsigned, Ptr<Node>> m_nodes;
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> m_interfaces;
    std::vector<Ptr<Transfer>> m_flows;
};

void SetDefaults()
{
    Config::SetDefault("ns3::TcpL4Protocol::SocketType", TypeIdValue(TcpDctcp::GetTypeId()));
    Config::SetDefault("ns3::TcpSocketBase::UseEcn", StringValue("On"));
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(PAYLOAD_BYTES));
    Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(10));
    // A window of one packet would wait for the timer of delayed acknowledgements.
    Config::SetDefault("ns3::TcpSocket::DelAckCount", UintegerValue(1));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(16 << 20));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(16 << 20));
}

} // namespace

int main()
{
    SetDefaults();
    Witness witness;
    witness.Read(std::cin);
    witness.Run();
}
